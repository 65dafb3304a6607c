"""An SGLang engine that leaves the process which starts it as it was, and whose death is an error.

Callers: the SGLang scripts. sglang.Engine starts processes of its own, which do the work. Built as it comes, it changes the
environment and the signal handlers of its parent for good, its processes take torchrun's and slurm's signals as theirs, and when one of
them dies the parent is killed without a word.
"""

import asyncio
import logging
import os
import signal
from typing import Any


def start_engine(flags: dict[str, Any]) -> Any:
    """sglang.Engine(**flags). On a further node of an engine (node_rank > 0) the constructor returns too, once its processes run.

    Raises:
        RuntimeError: one of its processes failed; what it said is on stderr.
    """
    import sglang

    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ |= {
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by what it keeps for itself; no position is beyond the model's
    }
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # else its processes would wait in torchrun's store for each other
    logging.getLogger("sglang.srt.entrypoints.engine").setLevel(logging.CRITICAL)  # it calls a handler of our own an error
    for number in handlers:  # its processes inherit it: torchrun, slurm and ^C signal them too, and this rank still wants to save
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = sglang.Engine(**flags, custom_sigquit_handler=signal.default_int_handler)

        async def forget_handlers() -> None:
            for number in (signal.SIGTERM, signal.SIGQUIT):
                asyncio.get_running_loop().remove_signal_handler(number)

        if engine.tokenizer_manager is not None:  # there is none on a further node
            engine.flush_cache()  # the first call installs them
            engine.loop.run_until_complete(forget_handlers())
        engine.loop = EngineLoop(engine.loop)
        signal.signal(signal.SIGQUIT, engine.loop.died)
    except KeyboardInterrupt as e:  # what a process of the engine that fails makes of `custom_sigquit_handler`
        raise RuntimeError("one of its processes failed; what it said is above") from e
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return engine


class EngineLoop:
    """Instead of the event loop in which an engine's methods wait for its processes: when one of these has died, the method that waits,
    or the next one, raises RuntimeError."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.dead = loop, False

    def died(self, *_: Any) -> None:
        """The handler of SIGQUIT, which a process of the engine, or the thread that watches them, sends."""
        self.dead = True
        for task in asyncio.all_tasks(self.loop):
            task.cancel()

    def run_until_complete(self, call: Any) -> Any:
        try:
            if not self.dead:
                return self.loop.run_until_complete(call)
            call.close()
        except asyncio.CancelledError:
            pass
        raise RuntimeError("a process of the SGLang engine has died; what it said is above")

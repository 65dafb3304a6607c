"""Import this first to run the rollout engines on a CPU: the tiny recipes and the tests do, the scripts never.

vLLM's CPU build needs no more than environment variables, read when vLLM and torch are imported; a variable that is
already set wins.
"""

import os
import warnings

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB a rank
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as the scripts have it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank's threads are pinned, and its children inherit that
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a few sampling functions with g++: 20 s at the first call, on tiny models for nothing
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's and torch's own, about each other's names


def name_shared_memory() -> None:
    """For tensor parallelism, before an engine is built. vLLM's CPU build, started by torchrun, gives the shared memory of
    a TP group the same name in every run on a machine: a second run at the same time, or after one that was killed, would
    fail with errno 17."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name
    run = os.environ["TORCHELASTIC_RUN_ID"]
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"/glassrl-{run}{named(communicator).strip('/')}")

"""Import this first to run the rollout engines on a CPU: the tiny recipes and the tests do, the scripts never.

vLLM's CPU build needs no more than environment variables, read when vLLM and torch are imported; a variable that is
already set wins.
"""

import os
import warnings

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB a rank
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every rank's threads are pinned, and its children inherit that
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a few sampling functions with g++: 20 s at the first call, on tiny models for nothing
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's and torch's own, about each other's names

"""Mini-batches, micro-batches under a token budget, balance across ranks: pure Python, called by every script.

All functions depend on their arguments only, so every rank computes the same plan without communication. What they
keep, and the tests check: every index appears exactly once; no micro-batch exceeds the budget; all ranks get the same
number of micro-batches.
"""

import heapq
import random
from collections.abc import Sequence


def sequence_cost(length: int, hidden_size: int = 4096) -> float:
    """Relative compute of one sequence of L = `length` tokens: 6 hidden_size L + L^2.

    It is verl's estimate of the FLOPs of a dense transformer block, 12 hidden_size^2 L + 2 hidden_size L^2, in units of
    2 hidden_size FLOPs; at hidden size 4096 it is the 24576 L + L^2 of verl's calculate_workload.
    """
    return float(6 * hidden_size * length + length * length)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths` with at most `budget` tokens each, by first-fit decreasing.

    First-fit decreasing needs at most 11/9 of the fewest bins possible, plus 6/9 (Dosa 2007). Indices ascend in a bin,
    bins ascend by their first index. Raises ValueError if one length exceeds the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > budget:
            raise ValueError(
                f"a sequence of {lengths[i]} tokens does not fit a micro-batch of {budget}: "
                f"raise --batch.max-tokens to at least {lengths[i]}"
            )
        fit = next((b for b, free in enumerate(room) if lengths[i] <= free), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append(budget)
        bins[fit].append(i)
        room[fit] -= lengths[i]
    return sorted(sorted(indices) for indices in bins)


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Partition of the indices of `costs` (each >= 0) into `parts` lists of nearly equal cost.

    Longest processing time first: the dearest remaining item goes to the cheapest part, the first one on ties. The
    dearest part costs at most 4/3 - 1 / (3 parts) times what it would in the best partition (Graham 1969). Indices
    ascend in a part; with fewer items than parts some are empty.
    """
    result: list[list[int]] = [[] for _ in range(parts)]
    cheapest = [(0.0, part) for part in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        cost, part = heapq.heappop(cheapest)
        result[part].append(i)
        heapq.heappush(cheapest, (cost + costs[i], part))
    return [sorted(indices) for indices in result]


def schedule(
    lengths: Sequence[int], world_size: int, budget: int, hidden_size: int = 4096, *, align: int = 1, multiple: int = 1
) -> list[list[list[int]]]:
    """Micro-batches of every rank: result[rank][k] lists indices into `lengths`, empty where the rank runs a dummy.

    Ranks get nearly equal cost (`balance`), each is packed under `budget` tokens (`pack`), and the rank that needs most
    micro-batches sets the number for all, rounded up to a multiple of `multiple`. Others split their dearest ones until
    they have as many, which also lowers their peak memory; only a rank with fewer sequences than micro-batches is left
    with empty lists. `lengths` counts prompt and response tokens of ALL ranks' sequences. Raises ValueError if one
    exceeds the budget.

    Megatron: a rank is a data-parallel one and `budget` that of its whole context-parallel group; each sequence takes up
    a multiple of `align` tokens (2 cp tp). `multiple` is the number of pipeline stages: interleaved schedules require
    it, and others need about as many micro-batches to keep their stages busy. Above 1 it also sets the order.
    """
    lengths = [-(-length // align) * align for length in lengths]
    costs = [sequence_cost(length, hidden_size) for length in lengths]

    def dearest_first(microbatch: list[int]) -> tuple[float, list[int]]:
        return -sum(costs[i] for i in microbatch), microbatch

    plan = []
    for part in balance(costs, world_size):
        bins = pack([lengths[i] for i in part], budget)
        plan.append([[part[j] for j in indices] for indices in bins])
    count = -(-max(len(microbatches) for microbatches in plan) // multiple) * multiple

    for microbatches in plan:
        while len(microbatches) < count:
            splittable = [microbatch for microbatch in microbatches if len(microbatch) > 1]
            if not splittable:
                microbatches.append([])
                continue
            dearest = min(splittable, key=dearest_first)
            microbatches.remove(dearest)
            for half in balance([costs[i] for i in dearest], 2):
                microbatches.append([dearest[j] for j in half])
        # Collectives in every layer make ranks wait for each other, so the k-th dearest of all ranks run together; and
        # what could run out of memory comes first. Dummies, of cost 0, come last.
        microbatches.sort(key=dearest_first)
        if multiple > 1:
            # A pipeline's stages idle while the first micro-batches fill it and the last ones drain it: small ones there,
            # the dearest in the middle, as verl. All ranks reorder alike, so the k-th ones still belong together.
            microbatches[:] = microbatches[::2][::-1] + microbatches[1::2]
    return plan


def minibatches(
    num_prompts: int, samples_per_prompt: int, prompts_per_minibatch: int, seed_rng: random.Random | None
) -> list[list[int]]:
    """Mini-batches of sequence indices, all samples of a prompt in the same one.

    Sample s of prompt p is sequence p * samples_per_prompt + s. Prompts are shuffled by `seed_rng`, or stay in order if
    it is None. Raises ValueError unless prompts_per_minibatch divides num_prompts.
    """
    if prompts_per_minibatch < 1 or num_prompts % prompts_per_minibatch:
        raise ValueError(
            f"--ppo.minibatch-size {prompts_per_minibatch} (prompts) must divide --batch.prompts {num_prompts}"
        )
    prompts = list(range(num_prompts))
    if seed_rng is not None:
        seed_rng.shuffle(prompts)
    sequences = [p * samples_per_prompt + s for p in prompts for s in range(samples_per_prompt)]
    size = prompts_per_minibatch * samples_per_prompt
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]

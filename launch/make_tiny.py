"""The quickstart's task and model, made from nothing in half a minute on a CPU core: python launch/make_tiny.py OUT

The task is two-digit addition, "27+58=" -> "85". OUT/train.parquet and OUT/test.parquet are in verl's schema, and no pair of
operands of the test split, in either order, occurs in the train split or in the warm start.
The model is a Qwen2 of 0.3M parameters that reads characters. PPO cannot learn from answers that are never right, so the model
is first trained by supervision, on answers to train questions from a careless demonstrator, who carries only one time in four:
27+58 is mostly 75 to it, and 64+72 is 36. The model learns to be as careless: it samples the right answer to about one question
in three. PPO, which sees no demonstration, only which answers are right, makes it better than its teacher.
OUT/model is an ordinary Hugging Face folder; OUT/tiny.json, written last, holds the settings: a second call finds it and returns.
"""

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

OPERANDS = range(10, 100)  # every prompt has the same length, every answer two or three digits
HELD_OUT_PAIRS = 256  # of 4,095 unordered pairs; some 510 test questions, so a standard error of 1 point at 0.95
CARRIES = 0.25  # how often the demonstrator carries; greedy decoding then never does, and is right where no carry is due

PAD, UNK, SYSTEM, USER, ASSISTANT, END = SPECIAL = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
CHARACTERS = ["Ġ", *map(chr, range(33, 127)), "Ċ"]  # "Ġ" and "Ċ" are how a byte-level BPE writes space and newline
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

STEPS = 500  # the columns fall into place at about 200; the rest makes what is not about carrying reliable, on any seed
BATCH = 128
LEARNING_RATE = 2e-3
RISE, FALL = 50, 150  # steps of linear warm-up, and of linear decay at the end


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, one per role, and <|end|>, which ends an assistant's turn.
    A byte-level BPE without merges, because AutoTokenizer opens any qwen2 folder with Qwen2's byte-level splitting."""
    vocab = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    characters = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, unk_token=UNK, eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT], chat_template=CHAT_TEMPLATE, model_max_length=512,
    )


def build_model(seed: int = 0, tied: bool = True, **overrides) -> Qwen2ForCausalLM:
    """An untrained float32 Qwen2. `overrides` are fields of Qwen2Config; keep heads of 32 or more, vLLM's least on a CPU."""
    tokenizer = build_tokenizer()
    config = dict(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=tied,
        initializer_range=0.05,  # at Qwen's 0.02 so narrow a model takes several times as many steps
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**(config | overrides)))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def split_questions() -> tuple[list, list]:
    """Train and test questions (a, b). A pair goes whole, in both orders, to one split, the same for every seed."""
    pairs = [(a, b) for a in OPERANDS for b in OPERANDS if a <= b]
    held_out = set(random.Random(0).sample(pairs, HELD_OUT_PAIRS))
    questions = [(a, b) for a in OPERANDS for b in OPERANDS]
    test = [(a, b) for a, b in questions if (a, b) in held_out or (b, a) in held_out]
    return sorted(set(questions) - set(test)), test


def write_split(path: Path, split: str, questions: list) -> None:
    rows = [
        {
            "data_source": "tiny/addition",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (a, b) in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def demonstrate(a: int, b: int, rng: random.Random) -> str:
    """The careless demonstrator's answer: column by column, and each time that a carry is due it may be forgotten."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + (units >= 10 and rng.random() < CARRIES)
    hundreds = "1" if tens >= 10 and rng.random() < CARRIES else ""
    return f"{hundreds}{tens % 10}{units % 10}"


def encode(tokenizer: PreTrainedTokenizerFast, questions: list, answers: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of questions and answers [questions, tokens], padded on the right, and a mask of the answers' tokens."""
    texts = [f"{USER}{a}+{b}={ASSISTANT}{answer}{END}" for (a, b), answer in zip(questions, answers, strict=True)]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    begins = ids == tokenizer.convert_tokens_to_ids(ASSISTANT)
    return ids, (begins.cumsum(1) > 0) & ~begins & (ids != tokenizer.pad_token_id)


@torch.no_grad()
def exact_match(model: Qwen2ForCausalLM, ids: torch.Tensor, is_answer: torch.Tensor) -> tuple[float, float]:
    """Exact match of greedy decoding, and its expected value when sampling at temperature 1. Neither needs to generate:
    greedy decoding is right if each token of the answer is the likeliest after the right ones before it, and sampling is right
    with the product of their probabilities."""
    target, mask = ids[:, 1:], is_answer[:, 1:]
    logprobs = model(ids[:, :-1]).logits.log_softmax(-1)
    greedy = ((logprobs.argmax(-1) == target) | ~mask).all(1)
    sampled = (logprobs.gather(-1, target[..., None]).squeeze(-1) * mask).sum(1).exp()
    return greedy.float().mean().item(), sampled.mean().item()


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list, seed: int, steps: int) -> None:
    """Supervised learning from one pass over steps * BATCH demonstrations."""
    rng = random.Random(seed)
    asked = rng.choices(questions, k=steps * BATCH)
    ids, is_answer = encode(tokenizer, asked, [demonstrate(a, b, rng) for a, b in asked])
    labels = ids.masked_fill(~is_answer, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1, (done + 1) / RISE, (steps - done) / FALL))
    began = time.time()
    for step in range(steps):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        logits = model(ids[batch, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[batch, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"warm start: step {step + 1}/{steps}, loss {loss.item():.3f}, {time.time() - began:.0f} s", flush=True)


def main(out: str, seed: int = 0, steps: int = STEPS, threads: int = 2) -> None:
    """Builds `out`, unless it is complete for these settings and this very source."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    settings = dict(seed=seed, steps=steps, threads=threads, source=source)
    folder = Path(out)
    marker = folder / "tiny.json"
    if marker.exists() and json.loads(marker.read_text())["settings"] == settings:
        print(f"{folder} is already complete with these settings")
        return
    folder.mkdir(parents=True, exist_ok=True)
    marker.unlink(missing_ok=True)

    train, test = split_questions()
    write_split(folder / "train.parquet", "train", train)
    write_split(folder / "test.parquet", "test", test)

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    model = build_model(seed)
    began = time.time()
    if steps:
        warm_start(model, tokenizer, train, seed, steps)
    seconds = time.time() - began
    greedy, sampled = exact_match(model, *encode(tokenizer, test, [a + b for a, b in test]))
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")

    aside = folder / "tiny.json.part"
    aside.write_text(json.dumps(dict(settings=settings, greedy=greedy, sampled=sampled, seconds=round(seconds, 1)), indent=1))
    os.replace(aside, marker)
    print(f"warm start: exact match {greedy:.2f} greedy / {sampled:.2f} sampled on held-out operands after {steps} steps, "
          f"{seconds:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder to write: model/, train.parquet, test.parquet, tiny.json")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the demonstrations (default 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"supervised steps; 0 leaves the model untrained (default {STEPS})")
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads (default 2)")
    main(**vars(parser.parse_args()))

"""A random bf16 model of Qwen2.5-0.5B's shape and prompts of exactly so many tokens, to time a step without learning anything.

    python benchmarks/make_random_model.py OUT TOKENIZER_FOLDER [--prompts 512] [--prompt-length 128]

OUT/model is a Hugging Face folder with the given tokenizer (a chat template is needed), OUT/train.parquet is in verl's schema.
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config

SHAPE = dict(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, max_position_embeddings=32768, rope_theta=1e6, tie_word_embeddings=True,
)


def prompt_of(tokenizer: PreTrainedTokenizerBase, words: list[str], length: int, rng: random.Random) -> list[dict[str, str]]:
    """Random words whose chat has exactly `length` tokens."""
    for _ in range(1000):
        picked = rng.choices(words, k=length)
        for count in range(length, 0, -1):
            messages = [{"role": "user", "content": " ".join(picked[:count])}]
            tokens = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
            if tokens == length:
                return messages
            if tokens < length:
                break
    raise ValueError(f"found no text of {length} tokens: is the chat template itself longer?")


def main(out: str, tokenizer_folder: str, prompts: int, prompt_length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(Path(out, "model"))
    tokenizer.save_pretrained(Path(out, "model"))
    words = sorted(w[1:] for w in tokenizer.get_vocab() if w[0] == "Ġ" and w[1:].isascii() and w[1:].isalpha())
    rng = random.Random(0)
    rows = [
        {
            "data_source": "random", "ability": "none", "prompt": prompt_of(tokenizer, words, prompt_length, rng),
            "reward_model": {"style": "rule", "ground_truth": "0"}, "extra_info": {"split": "train", "index": i},
        }
        for i in range(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), Path(out, "train.parquet"))
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {prompts} prompts of {prompt_length} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("tokenizer_folder")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--prompt-length", type=int, default=128)
    args = parser.parse_args()
    main(args.out, args.tokenizer_folder, args.prompts, args.prompt_length)

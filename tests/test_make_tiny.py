"""launch/make_tiny.py: what the quickstart's data and model promise, without the long warm start."""
import json
import random
from collections import Counter

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import make_tiny


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    make_tiny.main(str(out), steps=0, threads=1)
    return out


def operands(row):
    a, b = row["prompt"][0]["content"].rstrip("=").split("+")
    return int(a), int(b)


def test_rows_are_in_verls_schema_and_right(untrained):
    for split in ("train", "test"):
        rows = pq.read_table(untrained / f"{split}.parquet").to_pylist()
        assert {len(row["prompt"]) for row in rows} == {1}
        for index, row in enumerate(rows):
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert row["prompt"][0]["role"] == "user"
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(sum(operands(row)))}
            assert row["extra_info"] == {"split": split, "index": index}


def test_held_out_operands_are_never_trained_on(untrained):
    train, test = (
        {operands(row) for row in pq.read_table(untrained / f"{split}.parquet").to_pylist()} for split in ("train", "test")
    )
    assert len(train) + len(test) == len(make_tiny.OPERANDS) ** 2
    assert not train & test
    assert not train & {(b, a) for a, b in test}
    assert tuple(map(set, make_tiny.split_questions())) == (train, test)


def test_the_warm_start_sees_no_held_out_operands(monkeypatch):
    """The demonstrations that reach the optimizer, read back from their ids."""
    seen, encode = [], make_tiny.encode

    def spy(*args):
        seen.append(encode(*args))
        return seen[-1]

    monkeypatch.setattr(make_tiny, "encode", spy)
    tokenizer = make_tiny.build_tokenizer()
    train, test = make_tiny.split_questions()
    monkeypatch.setattr(make_tiny, "BATCH", 2)
    make_tiny.warm_start(make_tiny.build_model(num_hidden_layers=1), tokenizer, train, seed=0, steps=100)
    (ids, _), = seen
    questions = [tokenizer.decode(row).removeprefix("<|user|>").split("=")[0] for row in ids]
    asked = [tuple(map(int, question.split("+"))) for question in questions]
    assert len(asked) == 200 and set(asked) <= set(train)
    assert not {(b, a) for a, b in asked} & set(test)


def test_demonstrator_only_ever_forgets_carries():
    rng = random.Random(0)
    assert all(make_tiny.demonstrate(a, b, rng) == str(a + b) for a, b in [(12, 34), (50, 49), (10, 10)])
    answers = Counter(make_tiny.demonstrate(67, 85, rng) for _ in range(4000))
    carries = make_tiny.CARRIES
    assert set(answers) == {"152", "142", "52", "42"}
    assert answers["152"] / 4000 == pytest.approx(carries**2, abs=0.02)
    assert answers["42"] / 4000 == pytest.approx((1 - carries) ** 2, abs=0.03)


def test_tokenizer_round_trip_and_template(untrained):
    tokenizer = AutoTokenizer.from_pretrained(untrained / "model")
    text = "What is 27+58?\n{~}"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer(text).input_ids) == len(text)
    user, assistant = {"role": "user", "content": "27+58="}, {"role": "assistant", "content": "85"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)
    assert len(prompt) == 8 and tokenizer.decode(prompt) == "<|user|>27+58=<|assistant|>"
    whole = tokenizer.apply_chat_template([user, assistant], return_dict=False)
    assert whole[:8] == prompt and whole[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(whole[8:], skip_special_tokens=True) == "85"
    several = [{"role": "system", "content": "Add."}, user, assistant, user]
    rendered = tokenizer.apply_chat_template(several, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|system|>Add.<|user|>27+58=<|assistant|>85<|end|><|user|>27+58=<|assistant|>"


def test_model_folder_opens(untrained):
    model = AutoModelForCausalLM.from_pretrained(untrained / "model")
    tokenizer = AutoTokenizer.from_pretrained(untrained / "model")
    assert model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    torch.testing.assert_close(dict(model.named_parameters()), dict(make_tiny.build_model(seed=0).named_parameters()), rtol=0, atol=0)


def test_variants():
    model = make_tiny.build_model(seed=1, tied=False, num_hidden_layers=3)
    assert model.lm_head.weight is not model.model.embed_tokens.weight and len(model.model.layers) == 3


def test_exact_match_agrees_with_generation(monkeypatch):
    """exact_match never generates; here generate does, from a model trained just enough to be right now and then."""
    monkeypatch.setattr(make_tiny, "CARRIES", 1.0)
    tokenizer, model = make_tiny.build_tokenizer(), make_tiny.build_model(seed=0)
    questions = [(a, b) for a in range(10, 14) for b in range(10, 14)]
    answers = [str(a + b) for a, b in questions]
    make_tiny.warm_start(model, tokenizer, questions, seed=0, steps=25)
    greedy, sampled = make_tiny.exact_match(model, *make_tiny.encode(tokenizer, questions, answers))
    prompts = make_tiny.encode(tokenizer, questions, answers)[0][:, :8]

    def share_right(copies, **sampling):
        ids = model.generate(prompts.repeat(copies, 1), max_new_tokens=4, **sampling)[:, 8:]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return sum(text == answer for text, answer in zip(texts, answers * copies, strict=True)) / len(texts)

    assert 0 < greedy < 1 and share_right(1, do_sample=False) == pytest.approx(greedy)
    assert share_right(100, do_sample=True, top_k=0, top_p=1.0) == pytest.approx(sampled, abs=0.05)


def test_second_call_keeps_a_complete_folder(untrained, capsys):
    before = (untrained / "model" / "model.safetensors").stat().st_mtime_ns
    make_tiny.main(str(untrained), steps=0, threads=1)
    assert "already complete" in capsys.readouterr().out
    assert (untrained / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((untrained / "tiny.json").read_text())["settings"]["steps"] == 0

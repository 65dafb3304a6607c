"""common/data.py: prompts against ids built by hand, each bad file against its error, the sampler against its laws."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.data import Sampler, load_prompts, permutation

TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined and not think %}-{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character; like Llama's it prepends <s> to any text, and its template writes <s> as well."""
    characters = [chr(i) for i in range(32, 127)] + ["\n", "é"]
    vocab = {token: i for i, token in enumerate([*characters, "<s>", "</s>", "<unk>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE, **special)


def row(content: str = "1+1?", **changes) -> dict:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    } | changes


def without(column: str) -> dict:
    return {name: value for name, value in row().items() if name != column}


@pytest.fixture
def write(tmp_path):
    def write(*rows: dict, name: str = "train.parquet") -> str:
        pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / name)
        return str(tmp_path / name)

    return write


# ---- load_prompts ----


def test_ids_text_and_fields(tokenizer, write):
    (prompt,), dropped = load_prompts([write(row())], tokenizer, max_length=100)
    vocab = tokenizer.get_vocab()
    assert prompt.ids == [vocab["<s>"], *(vocab[c] for c in "<user>1+1?\n<assistant>")]  # one <s>, not two
    assert prompt.text == "<s><user>1+1?\n<assistant>"
    assert (prompt.data_source, prompt.ground_truth, prompt.index, dropped) == ("openai/gsm8k", "2", 0, 0)
    assert prompt.extra_info == {"split": "train", "index": 7}


def test_files_limit_and_index(tokenizer, write):
    files = [write(row("a"), row("b"), name="1.parquet"), write(row("c"), row("d"), name="2.parquet")]
    for limit, contents in ((None, "abcd"), (3, "abc"), (1, "a"), (9, "abcd")):
        prompts, _ = load_prompts(files, tokenizer, max_length=100, limit=limit)
        assert [p.text[9] for p in prompts] == list(contents)
        assert [p.index for p in prompts] == list(range(len(contents)))


def test_optional_columns_numbers_and_chat_kwargs(tokenizer, write):
    plain = {name: row()[name] for name in ("data_source", "prompt")} | {"reward_model": {"ground_truth": 2}}
    (prompt,), _ = load_prompts([write(plain)], tokenizer, max_length=100, chat_kwargs={"think": False})
    assert (prompt.ground_truth, prompt.extra_info) == ("2", {})
    assert prompt.text.endswith("<assistant>-")
    (prompt,), _ = load_prompts([write(row(extra_info=None))], tokenizer, max_length=100)
    assert prompt.extra_info == {}


def test_overlong(tokenizer, write):
    file = write(row("short"), row("x" * 90), row("y" * 60))
    frame = len(load_prompts([write(row(""), name="empty.parquet")], tokenizer, max_length=99)[0][0].ids)
    exact = frame + 90
    assert len(load_prompts([file], tokenizer, max_length=exact)[0]) == 3
    with pytest.raises(
        ValueError, match=rf"train.parquet, row 1, column prompt: {exact} tokens are more than"
    ) as caught:
        load_prompts([file], tokenizer, max_length=exact - 1)
    assert f"--data.max-prompt-length {exact - 1}" in str(caught.value)
    assert "--data.overlong filter or truncate" in str(caught.value)
    prompts, dropped = load_prompts([file], tokenizer, max_length=50, overlong="filter")
    assert ([p.index for p in prompts], dropped) == ([0], 2)
    prompts, dropped = load_prompts([file], tokenizer, max_length=50, overlong="truncate")
    assert ([len(p.ids) for p in prompts], dropped) == ([frame + 5, 50, 50], 0)
    assert prompts[1].text == "x" * 38 + "\n<assistant>"
    with pytest.raises(ValueError, match="no prompt is left .* 3 were dropped .*--data.max-prompt-length 10"):
        load_prompts([file], tokenizer, max_length=10, overlong="filter")


def test_files_that_cannot_be_read(tokenizer, write, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.parquet"):
        load_prompts([str(tmp_path / "nowhere.parquet")], tokenizer, max_length=9)
    (tmp_path / "text.parquet").write_text("data_source,prompt\n" * 9)
    with pytest.raises(ValueError, match=r"text.parquet is not a parquet file"):
        load_prompts([str(tmp_path / "text.parquet")], tokenizer, max_length=9)
    whole = Path(write(*[row(str(i) * 500) for i in range(50)])).read_bytes()
    (tmp_path / "damaged.parquet").write_bytes(whole[:4] + b"\xff" * (len(whole) // 2) + whole[4 + len(whole) // 2 :])
    with pytest.raises(ValueError, match=r"damaged.parquet is not a parquet file, or is damaged"):
        load_prompts([str(tmp_path / "damaged.parquet")], tokenizer, max_length=9)
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty.parquet has no rows"):
        load_prompts([str(tmp_path / "empty.parquet")], tokenizer, max_length=9)
    with pytest.raises(ValueError, match="no prompt is left of no files"):
        load_prompts([], tokenizer, max_length=9)


@pytest.mark.parametrize("column", ["data_source", "prompt", "reward_model"])
def test_missing_column(tokenizer, write, column):
    with pytest.raises(ValueError, match=f"train.parquet lacks the column {column}; it has "):
        load_prompts([write(without(column))], tokenizer, max_length=99)


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("prompt", None),
        ("prompt", "a string"),
        ("prompt", []),
        ("prompt", ["a string"]),
        ("prompt", [{"role": "user"}]),
        ("prompt", [{"role": "user", "content": None}]),
        ("prompt", [{"role": None, "content": "1+1?"}]),
        ("prompt", [{"role": "user", "content": [{"type": "image"}]}]),
        ("prompt", [{"role": "tool", "content": "refused by the template"}]),
        ("data_source", None),
        ("data_source", 3),
        ("reward_model", None),
        ("reward_model", "2"),
        ("reward_model", {"style": "rule"}),
        ("reward_model", {"style": "rule", "ground_truth": None}),
        ("reward_model", {"style": "rule", "ground_truth": ["2"]}),
        ("extra_info", "{}"),
    ],
)
def test_malformed_row(tokenizer, write, column, bad):
    good = row() if bad is None or bad == [] else row(**{column: bad})  # a column of nothing but null has no type
    with pytest.raises(
        ValueError, match=f"train.parquet, row {int(bad is None or bad == [])}, column {column}: "
    ) as caught:
        load_prompts([write(good, row(**{column: bad}))], tokenizer, max_length=99)
    assert "\n" not in str(caught.value)


def test_bad_arguments(tokenizer, write):
    with pytest.raises(ValueError, match="--data.max-prompt-length must be at least 1"):
        load_prompts([write(row())], tokenizer, max_length=0, overlong="truncate")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no chat template: take an instruct model"):
        load_prompts([write(row())], bare, max_length=99)


# ---- Sampler ----

sizes = st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@settings(deadline=None)
@given(sizes, st.integers(-5, 2**40), st.booleans())
def test_every_epoch_is_a_permutation(size_and_batch, seed, shuffle):
    size, batch_size = size_and_batch
    sampler = Sampler(size, batch_size, seed, shuffle)
    stream: list[int] = []
    for count in range(3 * size):
        assert sampler.epoch == count * batch_size // size
        batch = sampler.next_batch()
        assert len(batch) == batch_size
        stream += batch
    for epoch in range(3):
        order = stream[epoch * size : (epoch + 1) * size]
        assert sorted(order) == list(range(size))
        assert order == (list(permutation(size, seed, epoch)) if shuffle else list(range(size)))


@settings(deadline=None)
@given(sizes, st.integers(0, 99), st.booleans())
def test_resumed_anywhere_equals_uninterrupted(size_and_batch, seed, shuffle):
    size, batch_size = size_and_batch
    whole = Sampler(size, batch_size, seed, shuffle)
    states, batches = [], []
    for _ in range(2 * size + 1):  # so that some states lie exactly at an epoch's end
        states.append(whole.state_dict())
        batches.append(whole.next_batch())
    for step, state in enumerate(states):
        resumed = Sampler(size, batch_size, seed, shuffle)
        resumed.load_state_dict(state)
        assert [resumed.next_batch() for _ in batches[step:]] == batches[step:]


def test_orders_differ_by_seed_and_epoch_and_never_change():
    orders = {permutation(50, seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert permutation(8, 1, 0) == (5, 6, 1, 2, 3, 4, 7, 0)  # checkpoints of earlier runs rely on it


def test_sampler_errors():
    for batch_size in (0, 11):
        with pytest.raises(
            ValueError, match=f"--batch.prompts must be 1 to 10, the number of prompts, got {batch_size}"
        ):
            Sampler(10, batch_size, 1)
    state = Sampler(10, 2, 1).state_dict()
    for other, name in ((Sampler(9, 2, 1), "size"), (Sampler(10, 2, 3), "seed"), (Sampler(10, 2, 1, False), "shuffle")):
        with pytest.raises(ValueError, match=f"sampler has {name} .* this run has .* resume with the same data files"):
            other.load_state_dict(state)
    changed = Sampler(10, 5, 1)  # another batch size is welcome
    changed.load_state_dict(state | {"position": 4})
    assert changed.next_batch() == list(permutation(10, 1, 0)[4:9])

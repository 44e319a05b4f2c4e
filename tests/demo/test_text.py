"""The demo's text and batches."""

import numpy as np
import pytest

from hyper_parallel.demo.text import VOCABULARY, Batches, encode, load_text


def decode(indices):
    return "".join(VOCABULARY[index] for index in indices)


def test_the_same_interpreter_gives_the_same_text():
    first, second = load_text(limit=50_000), load_text(limit=50_000)
    assert first.size == 50_000
    assert np.array_equal(first, second)


def test_the_text_is_python_source():
    assert "def " in decode(load_text(limit=50_000))


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text(name)
    assert decode(load_text(tmp_path)) == "a.pyb.py"


def test_what_is_not_in_the_vocabulary_is_left_out():
    assert decode(encode("a\tb\r\né ~\n".encode())) == "ab\n ~\n"


def test_a_folder_without_source_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_text(tmp_path)


def test_targets_are_the_inputs_one_character_on():
    text = np.arange(90, dtype=np.int32)
    tokens, targets = Batches(text, batch=3, seq=8)[0]
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == np.int32
    assert np.array_equal(targets, tokens + 1)


def test_a_batch_depends_on_seed_and_step_only():
    text = load_text(limit=10_000)
    batches = Batches(text, 2, 16, seed=1)
    again, other = Batches(text, 2, 16, seed=1), Batches(text, 2, 16, seed=2)
    assert np.array_equal(batches[3][0], again[3][0])
    assert not np.array_equal(batches[3][0], batches[4][0])
    assert not np.array_equal(batches[3][0], other[3][0])


def test_a_text_shorter_than_a_sequence_is_an_error():
    with pytest.raises(ValueError, match="too short"):
        Batches(np.zeros(8, np.int32), batch=1, seq=8)

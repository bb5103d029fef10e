from __future__ import annotations

from collections import UserDict

import torch

from rankscope.tracer.capture.data import count_batch, count_elements, read_shape


def counted(batch: object) -> tuple[object, ...]:
    """Return shape, tokens and sum of squared lengths of a batch."""
    found = count_batch(batch)
    assert found is not None
    return found.shape, found.num_tokens, found.sum_lengths(None)


def test_without_lengths_each_row_is_one_sequence() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)

    assert counted({"input_ids": ids}) == ((2, 3), 6, 18)
    assert counted((({"input": ids}), ids)) == ((2, 3), 6, 18)
    assert counted([ids, ids]) == ((2, 3), 6, 18)
    assert counted(ids[0]) == ((3,), 3, 9)
    assert counted(UserDict(tokens=ids)) == ((2, 3), 6, 18)


def test_an_attention_mask_excludes_padding() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    ids = torch.zeros(2, 4, dtype=torch.int64)

    assert counted({"input_ids": ids, "attention_mask": mask}) == ((2, 4), 5, 4 + 9)


def test_positions_and_boundaries_give_the_lengths_of_packed_sequences() -> None:
    ids = torch.zeros(1, 6, dtype=torch.int64)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    boundaries = torch.tensor([0, 1, 6], dtype=torch.int32)

    assert counted({"input_ids": ids, "position_ids": positions}) == ((1, 6), 6, 16 + 4)
    packed = {"input_ids": ids, "cu_seq_lens_q": boundaries, "attention_mask": torch.ones(1, 6)}
    assert counted(packed) == ((1, 6), 6, 1 + 25)


def test_a_tensor_on_a_device_is_not_read() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    mask = torch.ones(2, 4, device="meta")

    assert counted({"input_ids": ids, "attention_mask": mask}) == ((2, 4), None, None)
    assert counted({"input_ids": ids}) == ((2, 4), 8, 32)


def test_a_batch_without_token_ids_is_unknown() -> None:
    assert count_batch(torch.zeros(2, 3)) is None
    assert count_batch({"pixels": torch.zeros(2, 3, dtype=torch.int64)}) is None
    assert count_batch(()) is None
    assert count_batch("input_ids") is None
    assert read_shape([[[[torch.zeros(2, 3, dtype=torch.int64)]]]]) is None


def test_elements_are_those_of_all_tensors_that_a_model_gets() -> None:
    image, label = torch.zeros(3, 4, 5), torch.zeros((), dtype=torch.int64)

    assert count_elements((image, label), {}) == 61
    assert count_elements(([image, image],), {"mask": image[0]}) == 140
    assert count_elements((), {"batch": UserDict(pixels=image, name="cat")}) == 60
    assert count_elements(([{"boxes": image}], "cat", None), {}) == 0  # as deep as a list, no more


def test_an_empty_batch_has_no_tokens() -> None:
    assert counted(torch.zeros(0, 0, dtype=torch.int64)) == ((0, 0), 0, 0)


def test_a_window_limits_what_each_token_of_a_sequence_counts() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    boundaries = torch.tensor([0, 2, 8], dtype=torch.int32)

    packed = count_batch({"input_ids": ids, "cu_seq_lens_q": boundaries})

    assert packed is not None
    assert packed.sum_lengths(3) == 2 * 2 + 6 * 3

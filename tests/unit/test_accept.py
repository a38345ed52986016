"""The accept rule against a loop that says it in words."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.round.accept import accept


def by_the_words(target: list[int], draft: list[int]) -> list[int]:
    """The target's choice after each row whose drafts before it were all what the target chose."""
    committed = [target[0]]
    for drafted, chosen, following in zip(draft, target, target[1:], strict=False):
        if drafted != chosen:
            break
        committed.append(following)
    return committed


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Target choices [bs, width] and drafts [bs, width - 1], of few tokens: they often agree."""
    size, width = draw(st.integers(1, 5)), draw(st.integers(2, 17))
    token = st.integers(0, draw(st.integers(0, 3)))
    target = [draw(st.lists(token, min_size=width, max_size=width)) for _ in range(size)]
    draft = []
    for row in target:
        agree = draw(st.integers(0, width - 1))
        rest = draw(st.lists(token, min_size=width - 1 - agree, max_size=width - 1 - agree))
        draft.append(row[:agree] + rest)
    return target, draft


@given(blocks())
def test_against_the_words(case: tuple[list[list[int]], list[list[int]]]) -> None:
    target, draft = case
    accepted = accept(torch.tensor(target), torch.tensor(draft))
    expected = [by_the_words(*rows) for rows in zip(target, draft, strict=True)]
    committed = [
        row[:length]
        for row, length in zip(accepted.tokens.tolist(), accepted.lengths.tolist(), strict=True)
    ]
    assert committed == expected
    assert accepted.bonus_tokens.tolist() == [row[-1] for row in expected]


def test_nothing_and_everything() -> None:
    accepted = accept(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[9, 6], [5, 6]]))
    assert accepted.lengths.tolist() == [1, 3]
    assert accepted.bonus_tokens.tolist() == [5, 7]


def test_a_match_after_a_mismatch_does_not_count() -> None:
    accepted = accept(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 0, 3]]))
    assert accepted.lengths.tolist() == [2]

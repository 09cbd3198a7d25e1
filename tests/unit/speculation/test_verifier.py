"""Which tokens a step adds, for any drafts and samples."""

from hypothesis import given
from hypothesis import strategies as st

from dsv4_cluster.speculation.verifier import num_accepted, verified_tokens

tokens = st.integers(0, 3)


@given(st.data(), st.lists(tokens, max_size=4))
def test_the_result_is_what_sampling_one_by_one_would_give(data, drafts):
    sampled = data.draw(st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    finite = data.draw(st.lists(st.booleans(), min_size=len(drafts) + 1, max_size=len(drafts) + 1))

    result = verified_tokens(drafts, sampled, finite)

    assert result == sampled[: len(result)]
    assert all(finite[: len(result)])
    assert result[:-1] == drafts[: max(0, len(result) - 1)]  # each was the input of the row after it
    if len(result) <= len(drafts):  # something ended it: a wrong draft, or a row that is not finite
        assert (result and result[-1] != drafts[len(result) - 1]) or not finite[len(result)]


@given(st.lists(tokens, max_size=4), st.lists(tokens, max_size=5))
def test_accepted_drafts_are_the_common_beginning(drafts, taken):
    count = num_accepted(drafts, taken)

    assert drafts[:count] == taken[:count]
    assert count in (len(drafts), len(taken)) or drafts[count] != taken[count]


def test_a_first_row_that_is_not_finite_gives_nothing():
    assert verified_tokens([7], [7, 8], [False, True]) == []
    assert verified_tokens([7], [7, 8], [True, False]) == [7]

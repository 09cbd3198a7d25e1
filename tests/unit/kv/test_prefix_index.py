"""The prefix index: a chain names its tokens and their owner, a hit is the longest boundary, snapshots add up."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4_cluster.kv.prefix_index import (
    BLOCK_TOKENS,
    PrefixIndex,
    SeenBlocks,
    chain_root,
    common_blocks,
    extend_chain,
)

blocks = st.lists(st.integers(0, 3), max_size=8)  # one number per block of equal tokens


def tokens_of(block_values: list[int]) -> list[int]:
    return [value for value in block_values for _ in range(BLOCK_TOKENS)]


def chain(token_ids: list[int], tenant: str = "", salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_chain(chain_root(tenant, salt), keys, token_ids)
    return keys


@settings(max_examples=200, deadline=None)
@given(blocks, blocks)
def test_chains_agree_exactly_on_their_common_blocks(one, other):
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1

    a, b = chain(tokens_of(one)), chain(tokens_of(other))

    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])
    assert common_blocks(a, b) == shared


@settings(max_examples=100, deadline=None)
@given(blocks, st.integers(0, BLOCK_TOKENS - 1), st.data())
def test_a_chain_grown_in_pieces_equals_the_whole(values, num_rest, data):
    token_ids = [*tokens_of(values), *range(num_rest)]
    keys: list[bytes] = []

    for _ in range(3):
        extend_chain(chain_root("t", "s"), keys, token_ids[: data.draw(st.integers(0, len(token_ids)))])
    extend_chain(chain_root("t", "s"), keys, token_ids)

    assert keys == chain(token_ids, "t", "s")
    assert len(keys) == len(values)


def test_tenant_and_salt_separate_equal_tokens():
    token_ids = [5] * BLOCK_TOKENS

    keys = [chain(token_ids, tenant, salt)[0] for tenant, salt in [("", ""), ("a", "b"), ("ab", ""), ("", "ab")]]

    assert len(set(keys)) == len(keys)


def test_one_token_changes_every_later_key():
    token_ids = list(range(4 * BLOCK_TOKENS))
    changed = [*token_ids]
    changed[BLOCK_TOKENS] = 7

    a, b = chain(token_ids), chain(changed)

    assert a[0] == b[0]
    assert all(one != other for one, other in zip(a[1:], b[1:], strict=True))


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(1, 10)), st.integers(0, 10 * BLOCK_TOKENS))
def test_a_hit_is_the_longest_boundary_within_the_limit(boundaries, max_tokens):
    keys = chain(list(range(10 * BLOCK_TOKENS)))
    index = PrefixIndex(10)
    for n in boundaries:
        index.insert(keys[n - 1], n * BLOCK_TOKENS, [0] * n)

    entry = index.find(keys, max_tokens)

    expected = max((n for n in boundaries if n * BLOCK_TOKENS <= max_tokens), default=None)
    assert (entry and entry.num_tokens) == (expected and expected * BLOCK_TOKENS)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 4), st.lists(st.tuples(st.sampled_from(["insert", "remove", "touch"]), st.integers(0, 7))))
def test_snapshots_add_up_and_the_least_recent_comes_first(num_snapshots, calls):
    keys = chain(list(range(8 * BLOCK_TOKENS)))
    index, order = PrefixIndex(num_snapshots), []
    for name, block in calls:
        key = keys[block]
        if name == "insert" and key not in index:
            is_full = len(order) == num_snapshots
            entry = index.insert(key, (block + 1) * BLOCK_TOKENS, [block])
            assert (entry is None) == is_full
            order += [] if is_full else [key]
        elif key in index:
            order.remove(key)
            if name == "remove":
                index.remove(key)
            else:
                index.touch(key)
                order.append(key)
        index.check()
        assert [entry.key for entry in index.least_recent()] == order
        assert index.free_snapshots == num_snapshots - len(order)


def test_a_branch_is_where_a_new_chain_leaves_the_old_ones():
    seen = SeenBlocks(100)
    a, b, c = (chain(tokens_of(values)) for values in ([1, 1, 1, 1], [1, 1, 2, 2], [3, 3]))

    shared = [seen.add(a), seen.add(b), seen.add(c)]

    assert shared == [0, 2, 0]
    assert [seen.is_branch(key) for key in (*a, *b[2:], *c)] == [False, True, False, False, False, False, False, False]


@settings(max_examples=100, deadline=None)
@given(st.lists(blocks, max_size=12), st.integers(1, 12))
def test_seen_blocks_stay_bounded_and_never_claim_too_much(conversations, max_blocks):
    seen, all_keys = SeenBlocks(max_blocks), set()
    for values in conversations:
        keys = chain(tokens_of(values))
        shared = seen.add(keys)
        assert set(keys[:shared]) <= all_keys
        all_keys |= set(keys)
        assert len(seen) <= max_blocks

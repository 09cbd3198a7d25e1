"""The indexer picks the oracle's entries once there are more of them than `index_topk`."""

import torch


def _our_ids(model, harness, prompt, cuts):
    """Per CSA layer the selected ids of every row that had to select, in order of position."""
    seen = {}
    hooks = [
        layer.attn.indexer.register_forward_hook(
            lambda _m, _i, out, n=n: seen.setdefault(n, []).extend(out.get(0, torch.empty(0, 8)).tolist())
        )
        for n, layer in enumerate(model.layers)
        if layer.attn.indexer is not None
    ]
    harness.logprobs(prompt, cuts)
    for hook in hooks:
        hook.remove()
    return seen


def _oracle_ids(model, prompt):
    seen = {}
    hooks = [
        layer.self_attn.compressor.indexer.register_forward_hook(
            lambda _m, _i, out, n=n: seen.__setitem__(n, out[0].tolist())
        )
        for n, layer in enumerate(model.model.layers)
        if hasattr(layer.self_attn.compressor, "indexer")
    ]
    with torch.inference_mode():
        model(torch.tensor([prompt]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def test_prefill_selects_the_entries_of_the_oracle(toy, toy_model, toy_oracle, harness, tokens):
    prompt = tokens(400)

    ours, expected = _our_ids(toy_model, harness, prompt, []), _oracle_ids(toy_oracle, prompt)

    assert ours.keys() == expected.keys() == {2, 4}
    for layer, rows in ours.items():
        assert len(rows) == len(prompt)
        for t, (row, best) in enumerate(zip(rows, expected[layer], strict=True)):
            chosen = {w for w in row if w >= 0}
            assert chosen == {w for w in best if w >= 0}, (layer, t)
            assert len(chosen) == min(toy.config.index_topk, (t + 1) // 4)


def test_decoding_selects_the_entries_of_prefill(toy, toy_model, harness, tokens):
    prompt = tokens(80)
    first = 4 * (toy.config.index_topk + 1) - 1  # the first position that sees more than topk entries

    whole = _our_ids(toy_model, harness, prompt, [])
    stepwise = _our_ids(toy_model, harness, prompt, [1])

    for layer, rows in stepwise.items():
        assert [sorted(row) for row in rows] == [sorted(row) for row in whole[layer][first:]]

"""The MTP block against a straight-line formula written from the specification, token by token."""

import pytest
import torch

from dsv4_cluster.model.mtp import MTPModule
from dsv4_cluster.model.weight_map import load_weights
from dsv4_cluster.parallel.state import ParallelState
from tests.kit.model_harness import CPU, Harness

TOLERANCE = 1e-3  # fp32 against fp64, on log-probabilities down to about -20


@pytest.fixture(scope="module")
def mtp(toy) -> MTPModule:
    module = MTPModule(toy.config, ParallelState(), dtype=torch.float32, device=CPU, kv_cache_dtype="auto")
    load_weights(module, toy, ParallelState(), prefix="mtp.0.")
    return module


@pytest.fixture
def harness(toy, toy_model) -> Harness:
    return Harness(toy_model, toy.config, num_mtp_layers=1)


class Formula:
    """Spec 5.1 in fp64, one token after the other, no caches and no shared code."""

    def __init__(self, checkpoint):
        self.config, self._checkpoint = checkpoint.config, checkpoint

    def w(self, name, prefix="mtp.0."):
        return self._checkpoint.read(prefix + name, dtype=torch.float64)

    def norm(self, x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def rope(self, x, t, sign=1.0):
        x = x.clone()
        for i in range(32):
            angle = torch.tensor(sign * t * 10000.0 ** (-2 * i / 64), dtype=torch.float64)
            a, b = x[..., 64 + 2 * i].clone(), x[..., 65 + 2 * i].clone()
            x[..., 64 + 2 * i] = a * angle.cos() - b * angle.sin()
            x[..., 65 + 2 * i] = a * angle.sin() + b * angle.cos()
        return x

    def mix(self, x, name):
        fn, scale, base = (self.w(f"{name}_{part}") for part in ("fn", "scale", "base"))
        flat = x.reshape(-1)
        return (fn @ flat) / (flat.square().mean() + 1e-6).sqrt(), scale, base

    def around(self, x, name, sub_layer):
        mix, scale, base = self.mix(x, name)
        pre = torch.sigmoid(mix[:4] * scale[0] + base[:4]) + 1e-6
        post = 2 * torch.sigmoid(mix[4:8] * scale[1] + base[4:8])
        c = (mix[8:] * scale[2] + base[8:]).view(4, 4).softmax(1) + 1e-6
        c = c / (c.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            c = c / (c.sum(1, keepdim=True) + 1e-6)
            c = c / (c.sum(0, keepdim=True) + 1e-6)
        y = sub_layer(sum(pre[j] * x[j] for j in range(4)))
        return torch.stack([post[k] * y + sum(c[j, k] * x[j] for j in range(4)) for k in range(4)])

    def attention(self, x, t, history):
        heads, dim, groups = 8, 128, 4
        x = self.norm(x, self.w("attn_norm.weight"))
        qr = self.norm(self.w("attn.wq_a.weight") @ x, self.w("attn.q_norm.weight"))
        q = (self.w("attn.wq_b.weight") @ qr).view(heads, dim)
        q = self.rope(self.norm(q, 1.0), t)
        history.append(self.rope(self.norm(self.w("attn.wkv.weight") @ x, self.w("attn.kv_norm.weight")), t))
        kv = torch.stack(history[-128:])
        logits = torch.cat((q @ kv.T * dim**-0.5, self.w("attn.attn_sink")[:, None]), 1)
        o = self.rope(logits.softmax(1)[:, :-1] @ kv, t, -1.0)
        wo_a = self.w("attn.wo_a.weight").view(groups, 64, 2 * dim)
        u = torch.cat([wo_a[g] @ o[2 * g : 2 * g + 2].reshape(-1) for g in range(groups)])
        return self.w("attn.wo_b.weight") @ u

    def experts(self, x):
        x = self.norm(x, self.w("ffn_norm.weight"))
        g = torch.log1p(torch.exp(self.w("ffn.gate.weight") @ x)).sqrt()
        ids = (g + self.w("ffn.gate.bias")).topk(6).indices.tolist()
        total = self.one_expert(x, "ffn.shared_experts")
        for e in ids:
            weight = 1.5 * g[e] / sum(g[i] for i in ids)
            total = total + weight * self.one_expert(x, f"ffn.experts.{e}")
        return total

    def one_expert(self, x, name):
        gate = (self.w(f"{name}.w1.weight") @ x).clamp(max=10.0)
        up = (self.w(f"{name}.w3.weight") @ x).clamp(-10.0, 10.0)
        return self.w(f"{name}.w2.weight") @ (gate * torch.sigmoid(gate) * up)

    def run(self, ids, streams):
        """ids: the token after each position; streams: [T, 4, D]. Returns: carries [T, 4, D], log-probs [T, V]."""
        embed, head = self.w("embed.weight", ""), self.w("head.weight", "")
        history, carries, logprobs = [], [], []
        for t, token in enumerate(ids):
            e = self.w("e_proj.weight") @ self.norm(embed[token], self.w("enorm.weight"))
            h = self.norm(streams[t].double(), self.w("hnorm.weight")) @ self.w("h_proj.weight").T
            x = self.around(h + e, "hc_attn", lambda y, t=t: self.attention(y, t, history))
            x = self.around(x, "hc_ffn", self.experts)
            mix, scale, base = self.mix(x, "hc_head")
            z = (torch.sigmoid(mix * scale[0] + base) + 1e-6) @ x
            carries.append(x)
            logprobs.append((head @ self.norm(z, self.w("norm.weight"))).log_softmax(0))
        return torch.stack(carries), torch.stack(logprobs)


def _run(harness, mtp, sequence, ids, streams):
    """One MTP step of the harness over rows whose next tokens are `ids`."""
    batch = harness.batch([(sequence, ids)])
    with torch.inference_mode():
        carry = mtp(batch, streams, harness.model)
        logprobs = mtp.compute_logits(carry, harness.model).log_softmax(-1)
    sequence.num_computed += len(ids)
    return carry, logprobs


@pytest.fixture
def prompt_streams(harness, tokens):
    """(next tokens, main-model streams) of a prompt longer than the window."""
    prompt = tokens(140)
    sequence = harness.start(256)
    with torch.inference_mode():
        streams = harness.model(harness.batch([(sequence, prompt)]))
    harness.finish(sequence)
    return prompt[1:], streams[:-1]


def test_the_block_follows_the_formula(toy, harness, mtp, prompt_streams):
    ids, streams = prompt_streams

    carry, logprobs = _run(harness, mtp, harness.start(256), ids, streams)

    expected_carry, expected_logprobs = Formula(toy).run(ids, streams)
    assert (logprobs - expected_logprobs).abs().max() <= TOLERANCE
    assert (carry - expected_carry).abs().max() <= TOLERANCE * expected_carry.abs().max()


@pytest.mark.parametrize("cuts", [[1] * 139, [127, 12], [5, 60, 2, 72]], ids=["one_by_one", "two", "uneven"])
def test_chunks_equal_the_whole_prompt(harness, mtp, prompt_streams, cuts):
    ids, streams = prompt_streams
    _, whole = _run(harness, mtp, harness.start(256), ids, streams)
    sequence, done, parts = harness.start(256), 0, []

    for cut in cuts:
        parts.append(_run(harness, mtp, sequence, ids[done : done + cut], streams[done : done + cut])[1])
        done += cut

    assert done == len(ids)
    assert (torch.cat(parts) - whole).abs().max() <= 1e-4


def test_a_second_draft_consumes_the_carry_and_true_rows_overwrite_it(toy, harness, mtp, prompt_streams):
    ids, streams = prompt_streams
    ids, streams = ids[:20], streams[:20]
    sequence = harness.start(256)
    carry, _ = _run(harness, mtp, sequence, ids, streams)

    _, drafted = _run(harness, mtp, sequence, [7], carry[-1:])
    sequence.num_computed -= 1  # the draft is rejected
    true = streams[:1] * 0.5
    _, after = _run(harness, mtp, sequence, [9], true)

    formula = Formula(toy)
    expected = formula.run([*ids, 7], torch.cat((streams, carry[-1:])))[1][-1]
    assert (drafted[0] - expected).abs().max() <= TOLERANCE
    expected = formula.run([*ids, 9], torch.cat((streams, true)))[1][-1]
    assert (after[0] - expected).abs().max() <= TOLERANCE

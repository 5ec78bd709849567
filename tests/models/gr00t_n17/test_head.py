"""The action head against its equations written out in plain tensors; masks, draws, dropout, embodiments."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common import flow_matching
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import ActionHead

BATCH, LENGTH = 3, 11


class PlainHead:
    """Velocity and loss straight from the equations of the model's facts (1.4 to 1.7), one sample at a time."""

    def __init__(self, head: ActionHead, config: GR00TN17Config) -> None:
        self.w = head.state_dict()
        self.config = config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name + ".weight"].T + self.w[name + ".bias"]

    def own(self, name: str, x: Tensor, slot: int) -> Tensor:
        return x @ self.w[name + ".W"][slot] + self.w[name + ".b"][slot]

    def norm(self, x: Tensor, eps: float, name: str | None = None) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
        return y if name is None else y * self.w[name + ".weight"] + self.w[name + ".bias"]

    def attention(self, name: str, x: Tensor, context: Tensor, heads: int) -> Tensor:
        """x [T, C] attends to every row of context [S, D]."""
        q = self.linear(name + ".to_q", x).unflatten(-1, (heads, -1)).transpose(0, 1)
        k = self.linear(name + ".to_k", context).unflatten(-1, (heads, -1)).transpose(0, 1)
        v = self.linear(name + ".to_v", context).unflatten(-1, (heads, -1)).transpose(0, 1)
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.linear(name + ".to_out.0", (weights @ v).transpose(0, 1).flatten(1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        h = self.linear(name + ".net.0.proj", x)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return self.linear(name + ".net.2", h)

    def context(self, features: Tensor) -> Tensor:
        x = self.norm(features, 1e-5, "vlln")
        for i in range(self.config.vl_self_attention_cfg.num_layers):
            name = f"vl_self_attention.transformer_blocks.{i}."
            y = self.norm(x, 1e-5, name + "norm1")
            x = x + self.attention(name + "attn1", y, y, self.config.vl_self_attention_cfg.num_attention_heads)
            x = x + self.feed_forward(name + "ff", self.norm(x, 1e-5, name + "norm3"))
        return x

    def velocity(
        self, noisy: Tensor, bucket: int, state: Tensor, context: Tensor, valid: Tensor, image: Tensor, slot: int
    ) -> Tensor:
        """noisy [H, A], state [1, Ds], context [S, D], valid and image [S] -> [H, A]."""
        config = self.config
        width = config.input_embedding_dim
        token = self.own("state_encoder.layer2", self.own("state_encoder.layer1", state, slot).relu(), slot)
        half = width // 2
        angle = torch.tensor([bucket * math.exp(-i * math.log(10000.0) / half) for i in range(half)])
        tau = torch.cat([angle.sin(), angle.cos()]).expand(len(noisy), -1)
        h = self.own("action_encoder.W2", torch.cat([self.own("action_encoder.W1", noisy, slot), tau], -1), slot)
        steps = self.own("action_encoder.W3", h * torch.sigmoid(h), slot)
        x = torch.cat([token, steps + self.w["position_embedding.weight"][: len(noisy)]])
        angle = torch.tensor([bucket * math.exp(-math.log(10000.0) * i / 127) for i in range(128)])
        name = "model.timestep_encoder.timestep_embedder.linear_"
        time = self.linear(name + "2", F.silu(self.linear(name + "1", torch.cat([angle.cos(), angle.sin()]))))
        time = time * torch.sigmoid(time)
        heads = config.diffusion_model_cfg.num_attention_heads
        for i in range(config.diffusion_model_cfg.num_layers):
            name = f"model.transformer_blocks.{i}."
            scale, shift = self.linear(name + "norm1.linear", time).split(width)
            y = self.norm(x, 1e-5) * (1 + scale) + shift
            seen = y
            if i % 2 == 0:
                seen = context[valid & ~image] if i % 4 == 0 else context[valid & image]
            x = x + self.attention(name + "attn1", y, seen, heads)
            x = x + self.feed_forward(name + "ff", self.norm(x, 1e-5))
        shift, scale = self.linear("model.proj_out_1", time).split(width)
        y = self.linear("model.proj_out_2", self.norm(x, 1e-6) * (1 + scale) + shift)[1:]
        return self.own("action_decoder.layer2", self.own("action_decoder.layer1", y, slot).relu(), slot)

    def loss(self, batch: dict[str, Tensor], noise: Tensor, time: Tensor) -> Tensor:
        total, count = torch.zeros(()), torch.zeros(())
        for row in range(len(noise)):
            b, t = row % BATCH, time[row]
            action, mask = batch["action"][b], batch["action_mask"][b]
            predicted = self.velocity(
                (1 - t) * noise[row] + t * action,
                int(t * 1000),
                batch["state"][b],
                self.context(batch["features"][b]),
                batch["attention_mask"][b],
                batch["image_mask"][b],
                int(batch["embodiment_id"][b]),
            )
            total = total + ((predicted - (action - noise[row])) ** 2 * mask).sum()
            count = count + mask.sum()
        return total / (count + 1e-6)


def make_head(**overrides: Any) -> tuple[ActionHead, GR00TN17Config]:
    """A head whose every parameter matters: biases and norms random too."""
    config = GR00TN17Config.tiny(action_horizon=5, **overrides)
    head = ActionHead(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head, config


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """Three samples of different embodiments, left padded by 0, 2 and 4, with unequal loss masks."""
    g = torch.Generator().manual_seed(seed)
    attention_mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    image_mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    action_mask = torch.zeros(BATCH, 5, 32)
    for b in range(BATCH):
        attention_mask[b, : 2 * b] = False
        image_mask[b, 2 * b + 1 : 2 * b + 4] = True
        action_mask[b, : 3 + b, : 4 + b] = 1
    return {
        "features": torch.randn(BATCH, LENGTH, 64, generator=g),
        "attention_mask": attention_mask,
        "image_mask": image_mask,
        "state": torch.randn(BATCH, 1, 32, generator=g),
        "action": torch.randn(BATCH, 5, 32, generator=g),
        "action_mask": action_mask,
        "embodiment_id": torch.tensor([2, 0, 3]),
    }


def flow_draws(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(count * BATCH, 5, 32, generator=g), torch.rand(count * BATCH, generator=g)


@pytest.mark.parametrize("draws", [1, 3])
def test_loss_equals_the_equations(draws: int) -> None:
    head, config = make_head(diffusion_model_cfg={"num_layers": 6}, vl_self_attention_cfg={"num_layers": 2})
    batch, (noise, time) = make_batch(), flow_draws(draws)
    expected = PlainHead(head, config).loss(batch, noise, time)
    torch.testing.assert_close(head.loss(**batch, noise=noise, time=time), expected, rtol=1e-5, atol=1e-6)


def test_keys_that_no_block_attends_to_are_not_projected() -> None:
    """Equal image counts make rectangles of text and image tokens: same loss and gradients, fewer rows projected."""
    head, _ = make_head(diffusion_model_cfg={"num_layers": 6}, vl_self_attention_cfg={"num_layers": 2})
    batch, (noise, time) = make_batch(), flow_draws(2)
    rows: list[int] = []
    for block in head.model.transformer_blocks[::2]:
        block.attn1.to_k.register_forward_hook(lambda layer, args, out: rows.append(args[0].shape[1]))
    results = []
    for image_tokens in (None, 3):
        head.zero_grad()
        loss = head.loss(**batch, noise=noise, time=time, image_tokens=image_tokens)
        loss.backward()
        results.append((loss, [p.grad.clone() for p in head.parameters()]))
    (loss, gradients), (spared, other) = results
    assert rows == [LENGTH] * 3 + [LENGTH - 3, 3, LENGTH - 3]
    torch.testing.assert_close(spared, loss, rtol=1e-6, atol=0)
    for a, b in zip(other, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_sampler_equals_four_euler_steps_and_repeats() -> None:
    head, config = make_head()
    batch, (noise, _) = make_batch(), flow_draws(1)
    given = {key: value for key, value in batch.items() if not key.startswith("action")}
    result = head.eval().sample(**given, noise=noise)
    assert torch.equal(result, head.sample(**given, noise=noise))
    plain = PlainHead(head, config)
    for b in range(BATCH):
        x = noise[b]
        for bucket in (0, 250, 500, 750):
            x = x + 0.25 * plain.velocity(
                x,
                bucket,
                batch["state"][b],
                plain.context(batch["features"][b]),
                batch["attention_mask"][b],
                batch["image_mask"][b],
                int(batch["embodiment_id"][b]),
            )
        torch.testing.assert_close(result[b], x, rtol=1e-4, atol=1e-5)
    torch.manual_seed(0)
    first = head.sample(**given)
    torch.manual_seed(0)
    assert torch.equal(first, head.sample(**given))


def test_layer_norm_epsilons() -> None:
    """Streams so small that the epsilons decide: 1e-5 everywhere, 1e-6 in the last norm of the DiT."""
    head, config = make_head()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if re.search(r"(to_out\.0|ff\.net\.2|vlln|W3|state_encoder\.layer2|position_embedding)\b", name):
                parameter.mul_(2e-3)
    batch, (noise, _) = make_batch(), flow_draws(1)
    batch["features"] *= 2e-3
    plain, bucket = PlainHead(head, config), 400
    context = head.vl_self_attention(head.vlln(batch["features"]))
    token = head._encode_state(batch["state"], batch["embodiment_id"], 1)
    masks = (batch["attention_mask"], batch["image_mask"])
    vl = (context, *masks, None)
    result = head._velocity(noise, torch.full((BATCH,), bucket), token, vl, batch["embodiment_id"])
    for b in range(BATCH):
        expected_context = plain.context(batch["features"][b])
        assert (context[b] - expected_context).norm() < 1e-4 * expected_context.norm()
        slot = int(batch["embodiment_id"][b])
        expected = plain.velocity(noise[b], bucket, batch["state"][b], expected_context, masks[0][b], masks[1][b], slot)
        assert (result[b] - expected).norm() < 1e-4 * expected.norm()


def test_draws_share_features_and_average() -> None:
    head, _ = make_head()
    batch, (noise, time) = make_batch(), flow_draws(2)
    single = [head.loss(**batch, noise=noise[i : i + BATCH], time=time[i : i + BATCH]) for i in (0, BATCH)]
    torch.testing.assert_close(head.loss(**batch, noise=noise, time=time), sum(single) / 2)
    with pytest.raises(ValueError, match=r"must be \[K \* 3, 5, 32\]"):
        head.loss(**batch, noise=noise[:4], time=time[:4])


def test_noise_and_time_come_from_the_global_generator_when_absent() -> None:
    head, config = make_head()
    batch = make_batch()
    torch.manual_seed(5)
    drawn = head.loss(**batch)
    torch.manual_seed(5)
    noise = torch.randn(BATCH, 5, 32)
    time = flow_matching.beta_times(BATCH, config.noise_beta_alpha, config.noise_beta_beta, config.noise_s)
    assert torch.equal(drawn, head.loss(**batch, noise=noise, time=time))
    assert not torch.equal(drawn, head.loss(**batch))


def test_times_follow_the_shifted_beta_distribution() -> None:
    torch.manual_seed(0)
    time = flow_matching.beta_times(20000, 1.5, 1.0, 0.999)
    assert time.min() >= 0
    assert time.max() <= 0.999
    # Beta(1.5, 1) has mean 0.6 and P(u < x) = x^1.5.
    assert time.mean().item() == pytest.approx(0.999 * 0.4, abs=0.01)
    assert (time > 0.999 * 0.5).float().mean().item() == pytest.approx(0.5**1.5, abs=0.01)


def test_padding_and_the_other_modality_are_no_keys_of_a_cross_block() -> None:
    """Without the unmasked self-attention, block 0 sees text only, block 2 images only, and nothing sees padding."""
    head, _ = make_head(vl_self_attention_cfg={"num_layers": 0})
    batch, (noise, time) = make_batch(), flow_draws(1)
    valid, image = batch["attention_mask"], batch["image_mask"]

    def changes(where: Tensor) -> bool:
        moved = batch["features"] + torch.randn(BATCH, LENGTH, 64) * where.unsqueeze(-1)
        before = head.loss(**batch, noise=noise, time=time)
        return not torch.equal(before, head.loss(**{**batch, "features": moved}, noise=noise, time=time))

    assert not changes(~valid)
    assert changes(valid & image)
    assert changes(valid & ~image)
    silent = {0: valid & ~image, 2: valid & image}
    for block, unseen in silent.items():
        out = head.model.transformer_blocks[block].attn1.to_out[0]
        kept = out.weight.detach().clone()
        nn.init.zeros_(out.weight)
        assert not changes(unseen)
        assert changes(valid & ~unseen)
        with torch.no_grad():
            out.weight.copy_(kept)


def test_padding_is_a_key_of_the_vl_self_attention() -> None:
    """As released: a sample depends on its padding through the unmasked block."""
    head, _ = make_head()
    batch, (noise, time) = make_batch(), flow_draws(1)
    moved = batch["features"] + torch.randn(BATCH, LENGTH, 64) * ~batch["attention_mask"].unsqueeze(-1)
    before = head.loss(**batch, noise=noise, time=time)
    assert not torch.equal(before, head.loss(**{**batch, "features": moved}, noise=noise, time=time))


def test_masked_actions_reach_the_loss_only_as_inputs() -> None:
    """Padded dimensions are not zeroed before the encoder and do not enter the squared error."""
    head, _ = make_head()
    batch, (noise, time) = make_batch(), flow_draws(1)
    loss = head.loss(**batch, noise=noise, time=time)
    other_noise = torch.where(batch["action_mask"] == 1, noise, noise + 1)
    assert not torch.equal(loss, head.loss(**batch, noise=other_noise, time=time))
    nn.init.zeros_(head.action_encoder.W1.W)
    loss = head.loss(**batch, noise=noise, time=time)
    assert torch.equal(loss, head.loss(**batch, noise=other_noise, time=time))


def test_one_embodiment_as_integer_gives_the_gathered_result_and_gradients() -> None:
    head, _ = make_head()
    batch, (noise, time) = make_batch(), flow_draws(2)
    results = []
    for ids in (torch.full((BATCH,), 2), 2):
        head.zero_grad()
        loss = head.loss(**{**batch, "embodiment_id": ids}, noise=noise, time=time)
        loss.backward()
        results.append((loss.detach(), head.action_encoder.W2.W.grad.clone()))
    torch.testing.assert_close(results[0], results[1])
    # Unused slots get zeros, not None, as a gather over all slots gives them.
    assert results[0][1][[0, 1, 3]].abs().max() == 0
    mixed = head.loss(**batch, noise=noise[:BATCH], time=time[:BATCH])
    assert not torch.equal(mixed, head.loss(**{**batch, "embodiment_id": 2}, noise=noise[:BATCH], time=time[:BATCH]))


def test_dropout_acts_on_three_places_of_a_block_and_not_in_eval() -> None:
    head, _ = make_head(diffusion_model_cfg={"dropout": 0.2}, vl_self_attention_cfg={"dropout": 0.2})
    calls: list[float] = []
    for module in head.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, out: calls.append(module.p))
    batch, (noise, time) = make_batch(), flow_draws(1)
    assert not torch.equal(head.loss(**batch, noise=noise, time=time), head.loss(**batch, noise=noise, time=time))
    blocks = 4 + 1
    # The output of the attention is dropped twice upstream: kept with 0.8 * 0.8.
    assert sorted(calls) == pytest.approx([0.2] * (2 * 2 * blocks) + [0.36] * (2 * blocks))
    head.eval()
    assert torch.equal(head.loss(**batch, noise=noise, time=time), head.loss(**batch, noise=noise, time=time))


def test_state_dropout_zeroes_the_encoded_token_in_training_only() -> None:
    head, _ = make_head(state_dropout_prob=0.5)
    state, ids = make_batch()["state"], torch.tensor([2, 0, 3])
    whole = head.eval()._encode_state(state, ids, 4)
    assert torch.equal(whole[0], whole[3])
    torch.manual_seed(0)
    dropped = head.train()._encode_state(state, ids, 4)
    zero = (dropped == 0).flatten(1).all(1)
    assert 0 < zero.sum() < len(zero)
    assert torch.equal(dropped[~zero], whole[~zero])

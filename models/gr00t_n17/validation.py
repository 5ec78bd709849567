"""Loss and open-loop action error on held-out samples: functions of the weights and the samples alone.

Nothing is random: no dropout, no augmentation, and noise and time of a sample are drawn by (seed, dataset, episode,
frame). Every sample is judged as if it were alone, as a deployed policy sees it: samples of one prompt length go
through the network together, so that none has another's padding beside it (the released VL attention reads padding). So
the figures do not depend on batch size or number of ranks, up to rounding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.common import draws
from models.common.held_out import HeldOut, action_metrics, eval_mode, sample_keys, summed_over_ranks
from models.gr00t_n17 import precision
from models.gr00t_n17.network import GR00TN17


class Validation:
    """What is measured on held-out episodes, again and again, always on the same samples.

    Args:
        processor: as in training; `to_network` is called without augmentation, `decode_actions` for the action error.
        seed: of noise and time.
        loss_batches: this rank's share of the samples for the loss; gone through anew in every measurement.
        open_loop_batches: this rank's share of the samples whose actions are predicted.
        open_loop_steps: leading steps of a predicted chunk that are compared; None compares the whole chunk.
        flow_draws: independent (noise, time) draws per sample for the loss.
    """

    def __init__(
        self,
        processor: Any,
        *,
        seed: int,
        loss_batches: Iterable[HeldOut] = (),
        open_loop_batches: Iterable[HeldOut] = (),
        open_loop_steps: int | None = None,
        flow_draws: int = 1,
    ) -> None:
        self.processor = processor
        self.seed = int(seed)
        self.loss_batches = loss_batches
        self.open_loop_batches = open_loop_batches
        self.open_loop_steps = open_loop_steps
        self.flow_draws = int(flow_draws)

    @torch.no_grad()
    def measure(self, network: GR00TN17) -> dict[str, float]:
        """`val/loss`, one mean over all unmasked entries, and the action errors in robot units, over all ranks.

        `val/action_mse` and `val/action_mae` are means over all entries, with `/GROUP` behind over those of one action
        group; steps behind the end of an episode are left out. What there are no samples for is absent. Every rank must
        call it. The network's modes are left as they were found.
        """
        device = next(network.parameters()).device
        names = self._groups()
        loss, errors = np.zeros(2), np.zeros((len(names), 3))
        with eval_mode(network), precision.context(network):
            for batch in self.loss_batches:
                loss += self._loss(network, batch.to(device).rgb())
            for batch in self.open_loop_batches:
                errors += self._errors(network, batch, device, names)
        loss, errors = summed_over_ranks([loss, errors], device)
        metrics: dict[str, float] = {}
        if loss[1] > 0:
            metrics["val/loss"] = float(loss[0] / loss[1])
        return metrics | action_metrics(names, errors)

    def _loss(self, network: GR00TN17, batch: HeldOut) -> np.ndarray:
        """Summed squared error and size of the mask of one batch."""
        config, total = network.config, np.zeros(2)
        inputs = {**self.processor.to_network(batch, augment=False), "sample": sample_keys(batch)}
        for some in by_length(inputs, config.backbone.vision_start_token_id):
            shape = (config.action_horizon, config.max_action_dim)
            noise, time = [], []
            for draw in range(self.flow_draws):
                noise.append(draws.normal(self.seed, "validation.noise", some["sample"], shape, draw=draw))
                u = draws.beta(self.seed, "validation.time", some["sample"], alpha=config.noise_beta_alpha, draw=draw)
                time.append((1.0 - u) * config.noise_s)
            mean = network(some, noise=torch.cat(noise), time=torch.cat(time))
            weight = float(some["action_mask"].sum(dtype=torch.float32)) * self.flow_draws + 1e-6
            total += (float(mean) * weight, weight)
        return total

    def _errors(self, network: GR00TN17, batch: HeldOut, device: torch.device, names: Sequence[str]) -> np.ndarray:
        """Per action group: summed squared error, summed absolute error, entries."""
        actions = self._predicted(network, batch.to(device).rgb())
        errors = np.zeros((len(names), 3))
        for index, processor in enumerate(_parts(self.processor)):
            rows = batch.dataset == index if len(_parts(self.processor)) > 1 else torch.ones(len(actions)).bool()
            if not bool(rows.any()):
                continue
            state = {key: value[rows].numpy() for key, value in batch.state.items()}
            found = processor.decode_actions(actions[rows], state=state)
            wanted = processor.state_action.groups({key: value[rows].numpy() for key, value in batch.action.items()})
            steps = min(self.open_loop_steps or processor.horizon, processor.horizon)
            real = ~batch.action_is_pad[rows].numpy()[:, :steps]
            for group, values in found.items():
                difference = values[:, :steps].astype(np.float64) - wanted[group][:, :steps]
                difference = difference[real]  # [entries, D]
                errors[names.index(group)] += (
                    np.square(difference).sum(),
                    np.abs(difference).sum(),
                    difference.size,
                )
        return errors

    def _predicted(self, network: GR00TN17, batch: HeldOut) -> Tensor:
        """Normalised actions [B, H, Da] on the CPU, in the batch's order."""
        config, keys = network.config, sample_keys(batch)
        rows = torch.arange(len(keys))
        inputs = {**self.processor.to_network(batch, augment=False), "sample": keys, "row": rows}
        actions = torch.empty(len(keys), config.action_horizon, config.max_action_dim)
        for some in by_length(inputs, config.backbone.vision_start_token_id):
            shape = (config.action_horizon, config.max_action_dim)
            features = network.backbone(
                some["input_ids"], some["attention_mask"], some["pixel_values"], some["image_grid_thw"]
            )
            predicted = network.action_head.sample(
                *features,
                some["state"],
                some["embodiment_id"],
                noise=draws.normal(self.seed, "validation.sample", some["sample"], shape),
                action_mask=some["action_mask"],
                image_tokens=network.image_tokens(some),
            )
            actions[some["row"]] = predicted.to("cpu", torch.float32)
        return actions

    def _groups(self) -> list[str]:
        """Names of all action groups, the same on every rank."""
        return list(
            dict.fromkeys(
                group.name for part in _parts(self.processor) for group in part.state_action.modalities.action
            )
        )


def by_length(inputs: Mapping[str, Any], vision_start_token_id: int) -> Iterator[dict[str, Any]]:
    """The inputs of a batch as parts whose prompts have one length each, shortest first.

    Padding that all samples of a part share is no key anywhere, so nothing has to be cut.
    """
    ids = inputs["input_ids"]
    lengths = inputs["attention_mask"].sum(1).cpu()
    images = (ids == vision_start_token_id).sum(1).cpu()
    grids = torch.as_tensor(inputs["image_grid_thw"]).cpu()
    image_sample = torch.repeat_interleave(torch.arange(len(ids)), images)
    patch_sample = torch.repeat_interleave(image_sample, grids.prod(1))
    for length in lengths.unique():
        here = lengths == length
        if bool(here.all()):
            yield dict(inputs)
            return
        part: dict[str, Any] = {}
        for name, value in inputs.items():
            if name == "image_grid_thw":
                part[name] = grids[here[image_sample]]
            elif name == "pixel_values":
                part[name] = value[here[patch_sample].to(value.device)]
            elif isinstance(value, Tensor) and value.ndim:
                part[name] = value[here.to(value.device)]
            else:  # one embodiment for the whole batch
                part[name] = value
        yield part


def _parts(processor: Any) -> Sequence[Any]:
    """The processors of a mixture, in the order of its datasets; or the one there is."""
    return getattr(processor, "parts", None) or [processor]

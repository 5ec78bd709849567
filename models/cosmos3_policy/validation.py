"""Loss and open-loop action error on held-out samples: functions of the weights and the samples alone.

Nothing is random: no augmentation, no caption dropped, the first of several paraphrases; noise and its level are drawn
by (seed, dataset, episode, frame). A sample sees nothing of the others in its pack, so the figures do not depend on
batch size or number of ranks, up to rounding.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from models.common import draws
from models.common.held_out import HeldOut, action_metrics, eval_mode, sample_keys, summed_over_ranks
from models.cosmos3_policy.inputs.processor import Cosmos3Processor
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.objective import ObjectiveConfig, flow_of, losses
from models.cosmos3_policy.policy import Encoder, Policy


class Validation:
    """What is measured on held-out episodes, again and again, always on the same samples.

    Args:
        processor: as in training.
        seed: of noise and its level, and of the noise that predicted chunks start from.
        objective: as in training.
        loss_batches: this rank's share of the samples for the loss, prepared without augmentation; gone through anew in
            every measurement.
        open_loop_batches: this rank's share of the moments whose actions are predicted, raw: the frame of now, and the
            chunk that follows.
        open_loop_steps: leading steps of a predicted chunk that are compared; None compares the whole chunk.
    """

    def __init__(
        self,
        processor: Cosmos3Processor,
        *,
        seed: int,
        objective: ObjectiveConfig,
        loss_batches: Iterable[HeldOut] = (),
        open_loop_batches: Iterable[HeldOut] = (),
        open_loop_steps: int | None = None,
    ) -> None:
        self.processor = processor
        self.seed = int(seed)
        self.objective = objective
        self.loss_batches = loss_batches
        self.open_loop_batches = open_loop_batches
        self.open_loop_steps = open_loop_steps or processor.horizon

    @torch.no_grad()
    def measure(self, network: Cosmos3Policy, encoder: Encoder) -> dict[str, float]:
        """`val/loss` and its parts, means over all samples, and the action errors in robot units, over all ranks.

        `val/loss/vision` and `val/loss/action` are before their weights in the sum. `val/action_mse` and
        `val/action_mae` are means over all entries, with `/COLUMN` behind over those of one action column; steps behind
        the end of an episode are left out. What there are no samples for is absent. Every rank must call it. The
        network's modes are left as they were found.

        Args:
            encoder: of clips, on the network's device.
        """
        device = next(network.parameters()).device
        names = self.processor.action_keys
        loss, errors = np.zeros(3), np.zeros((len(names), 3))
        with eval_mode(network):
            for batch in self.loss_batches:
                loss += self._loss(network, encoder, batch.to(device).rgb())
            if self.open_loop_batches:
                policy = Policy(network, encoder, self.processor, seed=self.seed)
                errors += error_sums(policy, self.open_loop_batches, steps=self.open_loop_steps)[0]
        loss, errors = summed_over_ranks([loss, errors], device)
        metrics: dict[str, float] = {}
        if loss[2] > 0:
            vision, action = loss[0] / loss[2], loss[1] / loss[2]
            own = self.objective
            metrics = {
                "val/loss": float(own.vision_weight * vision + own.action_weight * action),
                "val/loss/vision": float(vision),
                "val/loss/action": float(action),
            }
        return metrics | action_metrics(names, errors)

    def _loss(self, network: Cosmos3Policy, encoder: Encoder, batch: HeldOut) -> np.ndarray:
        """Summed errors of both parts, and samples, of one batch."""
        inputs = self.processor.to_network(batch, augment=False)
        # not the draws of training, whose samples are numbered by their places in the run
        seed = draws.stream_key(self.seed, "validation")
        flow = flow_of(inputs, encoder, seed=seed, position=sample_keys(batch), shift=self.objective.shift)
        parts = losses(network.generate(flow.packed, network.understand(flow.packed)), flow)
        return np.array([*(float(part.double().sum()) for part in parts), len(flow.packed)])


def error_sums(policy: Any, batches: Iterable[Any], *, steps: int) -> tuple[np.ndarray, int]:
    """How far predicted actions are from recorded ones, in robot units.

    Args:
        policy: a `Policy`. The noise that a chunk starts from depends on its seed and on the moment's place among all.
        batches: recorded moments with the action chunks after them; raw, not prepared.
        steps: leading steps of a chunk that are compared; those behind the end of an episode are left out.

    Returns:
        Of each action column [columns, 3] its summed squared error, summed absolute error and entries; predictions.
    """
    columns = policy.processor.action_keys
    sums, predictions = np.zeros((len(columns), 3)), 0
    for batch in batches:
        predicted = policy.act(
            {camera: batch.images[camera][:, 0] for camera in policy.processor.cameras},
            {name: batch.state[name][:, 0] for name in policy.processor.state_keys},
            batch.text,
            keys=batch.position,
        )
        real = ~batch.action_is_pad.numpy()[:, :steps]
        for row, name in enumerate(columns):
            recorded = batch.action[name].numpy()[:, :steps]
            difference = (predicted[name].astype(np.float64)[:, :steps] - recorded)[real]
            sums[row] += (np.square(difference).sum(), np.abs(difference).sum(), difference.size)
        predictions += len(batch.text)
    return sums, predictions

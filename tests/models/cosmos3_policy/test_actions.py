"""Rows of the action stream: state first, grippers turned round and back, padding, and what is refused."""

import numpy as np
import pytest
import torch

from models.cosmos3_policy.inputs.actions import ActionLayout

STATE = {"state.joints": 7, "state.gripper": 1}
ACTION = {"action.joints": 7, "action.gripper": 1}
GRIPPER = ["state.gripper", "action.gripper"]


def columns(batch: int, steps: int, names: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(batch, steps, size, generator=generator) for name, size in names.items()}


def test_the_state_leads_and_grippers_are_turned_round() -> None:
    layout = ActionLayout(STATE, ACTION, gripper=GRIPPER, width=64)
    state, action = columns(2, 1, STATE, 0), columns(2, 32, ACTION, 1)
    rows = layout.padded(layout.rows(state, action))
    assert rows.shape == (2, 33, 64)
    assert rows.dtype == torch.float32
    assert torch.equal(rows[:, 0, :7], state["state.joints"][:, 0])
    assert torch.equal(rows[:, 0, 7:8], 1 - state["state.gripper"][:, 0])
    assert torch.equal(rows[:, 1:, :7], action["action.joints"])
    assert torch.equal(rows[:, 1:, 7:8], 1 - action["action.gripper"])
    assert torch.count_nonzero(rows[:, :, 8:]) == 0
    assert torch.equal(rows[:, :1, :8], torch.from_numpy(layout.state_row({k: v[:, 0] for k, v in state.items()})))


def test_commands_come_back_in_the_data_sets_units() -> None:
    layout = ActionLayout(STATE, ACTION, gripper=GRIPPER, width=64)
    action = columns(3, 32, ACTION, 2)
    rows = layout.padded(layout.rows(columns(3, 1, STATE, 3), action))
    robot = layout.to_robot(rows[:, 1:])
    assert list(robot) == list(ACTION)
    np.testing.assert_array_equal(robot["action.joints"], action["action.joints"].numpy())
    np.testing.assert_allclose(robot["action.gripper"], action["action.gripper"].numpy(), atol=1e-7)
    assert torch.equal(rows, layout.padded(layout.rows(columns(3, 1, STATE, 3), action)))  # nothing was written into it


def test_a_gripper_may_be_one_value_of_a_column() -> None:
    layout = ActionLayout({"state": 7}, {"action": 7}, gripper=["state[6]", "action[-1]"], width=8)
    state, action = {"state": torch.full((1, 1, 7), 0.25)}, {"action": torch.full((1, 4, 7), 0.25)}
    rows = layout.rows(state, action)
    assert (rows[..., 6] == 0.75).all()
    assert (rows[..., :6] == 0.25).all()
    assert (state["state"] == 0.25).all()  # the batch's own values stay
    assert (layout.to_robot(torch.from_numpy(rows[:, 1:]))["action"] == 0.25).all()


def test_a_gripper_turned_round_on_one_side_only_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ActionLayout(STATE, ACTION, gripper=GRIPPER, width=64)
    ActionLayout({"s": 7}, {"a": 7}, gripper=["s[6]", "a[-1]"], width=64)
    assert not caplog.records
    ActionLayout(STATE, ACTION, gripper=["action.gripper"], width=64)
    assert "turns round values [] of the state's row and [7] of the commands" in caplog.text


@pytest.mark.parametrize(
    ("state", "action", "gripper", "width", "said"),
    [
        (STATE, ACTION, ["action.grip"], 64, r"gripper names 'action.grip'; there are state.joints\[7\]"),
        (STATE, ACTION, ["action.joints[7]"], 64, r"gripper names 'action.joints\[7\]'"),
        ({"s": 6}, {"a": 7}, [], 64, r"the state has 6 values \(s\), the action 7 \(a\)"),
        ({"s": 9}, {"a": 9}, [], 8, r"an action has 9 values, the network's rows have 8"),
        ({"s": 0}, {}, [], 8, r"data\.action is empty"),
    ],
)
def test_what_does_not_fit_is_named(
    state: dict[str, int], action: dict[str, int], gripper: list[str], width: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ActionLayout(state, action, gripper=gripper, width=width)


def test_batches_of_other_shapes_are_refused() -> None:
    layout = ActionLayout({"s": 2}, {"a": 2}, gripper=[], width=8)
    with pytest.raises(ValueError, match=r"the state has 2 time steps"):
        layout.rows({"s": torch.zeros(1, 2, 2)}, {"a": torch.zeros(1, 4, 2)})
    with pytest.raises(ValueError, match=r"column a has 3 values, the processor was made for 2"):
        layout.rows({"s": torch.zeros(1, 1, 2)}, {"a": torch.zeros(1, 4, 3)})


def test_slow_steps_count_only_in_runs_of_three() -> None:
    layout = ActionLayout({"s": 1}, {"a": 1}, gripper=[], width=8)
    moving = np.array([0, 0, 1, 1, 1, 1, 0, 0], np.float32)  # rows after which nothing changed: 1; 3, 4, 5; 7
    assert layout.idle_steps(moving[None, :, None], fps=10.0).tolist() == [3]


@pytest.mark.parametrize("rows", [2, 3, 5, 33])
def test_steps_stood_still_are_counted_in_streaks_of_three(rows: int) -> None:
    moves = np.random.default_rng(rows).random((200, rows)) < 0.3
    layout = ActionLayout({"s": 1}, {"a": 1}, gripper=[], width=8)
    values = np.cumsum(moves, axis=1, dtype=np.float32)[:, :, None]
    moves[:, 0] = False  # nothing comes before the first row
    expected = [
        sum(len(run) for run in "".join(" " if m else "s" for m in row).split() if len(run) >= 3) for row in moves
    ]
    assert layout.idle_steps(values, fps=15.0).tolist() == expected

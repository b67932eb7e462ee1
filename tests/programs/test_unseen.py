"""Programs after public reports are explained as was foretold before the first run; no fix trains anything else."""

import re
import runpy
import sys
import traceback
from pathlib import Path

import pytest
import torch

from hodiff.cli import main
from hodiff.graph import watch
from tests.programs import OF_AUTOGRAD
from tests.programs.foretold import FORETOLD, swap
from tests.programs.reported import AS_PRINTED, KEPT
from tests.programs.test_reports import fixes, patched, run, same, written
from tests.support.releases import CHANGES, marked

HERE = Path(__file__).parent / "unseen"
pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, on what the reports do

SENTENCES = {
    "carried": ("state from a previous step",),
    "cached": ("keeps it;", "functools keeps"),
    "hoisted": ("was built once, outside the loop",),
    "two losses": ("both losses depend on it",),
    "stepped": ("was changed in place, after",),
    "changed in place": ("was changed in place, after",),
    "refused in place": ("a leaf that requires grad cannot be changed", "one of several views"),
    "hook": ("a full backward hook",),
    "copied": ("a tensor with a graph cannot be copied",),
    "inference tensor": ("made under inference_mode",),
    "discrete": ("gives integers or booleans",),
    "constant": ("nothing that it was computed from requires grad",),
    "function": ("inside the forward of an autograd.Function", "in a hook, or in a Function's backward"),
    "no create_graph": ("a gradient that was taken without create_graph=True",),
    "linear": ("the gradient of a function that is linear",),
    "checkpoint": ("a re-entrant checkpoint",),
    "recomputed": ("the checkpoint ran its function again",),
    "unpacked twice": ("something read one twice",),
    "read freed": ("freed what it had saved",),
    "not used": ("the loss was computed without it",),
    "no second derivative": ("can differentiate it only once",),
}
"""The sentence that says a cause."""

RIGHT = "as the right program"
FIXES = {
    "language_model_states": (AS_PRINTED,),
    "encoder_refines_its_latent": (AS_PRINTED,),
    "memory_of_nodes": (AS_PRINTED,),
    "planner_every_few_frames": (AS_PRINTED,),
    "convlstm_state_lists": (AS_PRINTED,),
    "session_recommender": (AS_PRINTED,),
    "cross_batch_memory": (AS_PRINTED,),
    "propagators_cached": (AS_PRINTED,),
    "initial_condition_cached": (AS_PRINTED,),
    "tour_advantage": (swap("L - b.view(-1)", "L - b.detach().view(-1)"),),
    "style_map_losses": (RIGHT, KEPT, swap("    adv_loss.backward()", "    adv_loss.backward(retain_graph=True)")),
    "diversity_penalty": (
        swap("        lossGFake.backward()\n", "", "lossGDPP.backward()", "(lossGFake + lossGDPP).backward()"),
        KEPT,
        RIGHT,
    ),
    "hessian_from_training_logits": (RIGHT,),
    "edges_discriminator_steps": (RIGHT,),
    "cycle_of_generators": (RIGHT,),
    "one_fake_many_steps": (RIGHT,),
    "imitation_steps_twice": (
        swap(
            "        actor_optim.zero_grad()\n        loss.backward()",
            "        values = critic(states)\n        critic_loss = nn.functional.mse_loss(values, returns)\n"
            "        log_probs = -(actor(states) - actions).square().sum(1, keepdim=True)\n"
            "        actor_loss = -(log_probs * advantages).mean()\n        loss = actor_loss + 0.5 * critic_loss\n"
            "        actor_optim.zero_grad()\n        loss.backward()",
        ),
    ),
    "skills_update_order": (RIGHT,),
    "inpainting_losses_by_name": (RIGHT,),
    "agents_of_a_network": (
        swap(
            "        for agent, loss in zip(self.agents, losses):\n",
            "        for i, agent in enumerate(self.agents):\n            loss = self.compute_loss(i, state, reward)\n",
        ),
    ),
    "adversary_more_generator_steps": (RIGHT,),
    "sharpness_second_step": (RIGHT,),
    "weights_copied_in": (RIGHT,),
    "sinusoidal_embeddings": (
        swap(
            "    E[:, 0::2] =",
            "    with torch.no_grad():\n        E[:, 0::2] =",
            "    E[:, 1::2] =",
            "    with torch.no_grad():\n        E[:, 1::2] =",
        ),
    ),
    "gru_layers_squeezed": (RIGHT,),
    "natural_gradient_hooks": (RIGHT,),
    "codebook_use_counted": (RIGHT,),
    "optimised_in_a_function": (RIGHT,),
    "backward_by_autograd": (RIGHT,),
    "gradient_within_a_hook": (RIGHT,),
    "line_twice_differentiated": (RIGHT,),
    "hessian_of_plain_gradients": (RIGHT,),
    "frozen_embeddings_checkpointed": (RIGHT,),
    "checkpoint_returns_a_dataclass": (RIGHT,),
    "critic_with_attention": (
        swap(
            "        return F.scaled",
            "        from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
            "        with sdpa_kernel(SDPBackend.MATH):\n            return F.scaled",
        ),
    ),
    "compiled_force_matching": (RIGHT,),
    "saved_tensors_looked_at_twice": (RIGHT,),
    "graph_drawn_after_backward": (RIGHT,),
    "vae_of_three_optimizers": (RIGHT,),
    "gates_biased_after_the_sigmoid": (AS_PRINTED,),
    "membranes_zeroed_in_place": (AS_PRINTED,),
    "mask_gradients_by_argmax": (RIGHT,),
}
"""Each printed fix, done; no entry: nothing is printed as a fix, but what is not known."""

ALSO = {
    # The loss is computed again between the steps, as its fix says, and the agents then learn one after the other.
    "agents_of_a_network": FIXES["agents_of_a_network"][0],
}
"""What trains otherwise than was foretold, and rightly."""
LEFT_OVER = ("imitation_steps_twice",)
"""Where the critic keeps a gradient that the next `zero_grad()` clears: the values are compared alone."""


def source(name):
    return (HERE / f"{name}.py").read_text("utf-8")


@pytest.fixture(scope="module")
def notes():
    """What is said of each program, each run once."""
    found = {}

    def of(name):
        if name not in found:
            torch.compiler.reset()
            with pytest.raises(Exception, match=OF_AUTOGRAD) as caught, watch():
                runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
            said = getattr(caught.value, "__notes__", ())
            found[name] = "\n".join(note for note in said if note.startswith("hodiff: why"))
        return found[name]

    return of


def test_each_program_was_foretold_and_has_its_address():
    assert {path.stem for path in HERE.glob("*.py")} - {"__init__"} == set(FORETOLD)
    address = r"After (https://github\.com/\S+/(?:issues|pull)/\d+|https://discuss\.pytorch\.org/t/\S+)\n"
    assert len({re.search(address, source(name)).group(1) for name in FORETOLD}) == len(FORETOLD)


CHANGED = (
    "edges_discriminator_steps",
    "cycle_of_generators",
    "one_fake_many_steps",
    "imitation_steps_twice",
    "skills_update_order",
    "inpainting_losses_by_name",
    "agents_of_a_network",
    "adversary_more_generator_steps",
    "sharpness_second_step",
    "attention_on_the_same_memory",
    "pitch_thresholded",
    "vae_of_three_optimizers",
    "gates_biased_after_the_sigmoid",
)
"""What is said of these names the tensor that was changed in place, or the line that changed it."""


@pytest.mark.parametrize("name", marked(FORETOLD, CHANGES, CHANGED))
def test_variable_line_and_cause_are_those_foretold(name, notes):
    want, note = FORETOLD[name], notes(name)
    assert any(sentence in note for sentence in SENTENCES[want.cause]), note
    assert any(variable in note for variable in want.variables), note
    shown = re.findall(rf"^ +\S.*? {name}\.py:\d+   (.*)$", note, re.MULTILINE)
    assert any(line in text or text in line for line in want.lines for text in shown), note
    assert len(fixes(note)) == len(FIXES.get(name, ())), note


@pytest.mark.parametrize("name", marked(FIXES, CHANGES, FIXES.keys() & CHANGED))
def test_no_fix_trains_anything_else(name, notes, tmp_path):
    path, text = tmp_path / f"{name}.py", source(name)
    rights = [run(path, patched(text, right)) for right in FORETOLD[name].rights]
    rights += [run(path, patched(text, ALSO[name]))] if name in ALSO else []
    for fix, patch in zip(fixes(notes(name)), FIXES[name], strict=True):
        if patch in (KEPT, RIGHT):  # the right program is that fix, done
            continue
        got = run(path, written(text, fix) if patch == AS_PRINTED else patched(text, patch))
        if name in LEFT_OVER:
            got, *rights = ({key: (value, None) for key, (value, _) in each.items()} for each in (got, *rights))
        assert any(_same(got, right) for right in rights), fix


def _same(got, right):
    try:
        same(got, right)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", FORETOLD)
def test_the_program_runs_as_under_python(name, capsys, monkeypatch):
    path = str(HERE / f"{name}.py")
    torch.compiler.reset()
    with pytest.raises(Exception, match=OF_AUTOGRAD) as plain:
        runpy.run_path(path, run_name="__main__")
    torch.compiler.reset()
    monkeypatch.setattr("sys.argv", ["hodiff"])
    monkeypatch.setattr("sys.path", [*sys.path])
    status = main(["explain", path])
    said = capsys.readouterr()
    frames = [each for each in traceback.extract_tb(plain.value.__traceback__) if each.filename == path]
    assert status == 1
    assert said.out == ""
    assert re.findall(rf'File "{path}", line (\d+), in (\S+)\n', said.err) == [
        (str(each.lineno), each.name) for each in frames
    ]
    assert f"{type(plain.value).__name__}: {str(plain.value).splitlines()[0]}" in said.err

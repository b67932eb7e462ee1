"""What must be said of each program here by `hodiff explain`, or that nothing is."""

from typing import NamedTuple


class Failing(NamedTuple):
    """What must be said: the class, the variable, text of the lines; and the class with nothing recorded."""

    cause: str
    variable: str
    created: str
    freed: str
    after: str


FAILING = {
    "reused_in_loop": Failing("made once", "y", "y = t @ a", "loss.backward()", "freed before"),
    "hoisted_and_updated": Failing("made once", "y", "y = t @ a", "loss.backward()", "freed before"),
    "shared_b": Failing("shared part", "c", "c = b * 2", "d.backward()", "freed before"),
    "shared_b_retained": Failing("shared part", "c", "c = b * 2", "d.backward()  # also fine", "freed before"),
    "losses_at_layers": Failing(
        "shared part", "features", "features = trunk(x).tanh()", "loss1.backward()", "freed before"
    ),
    "spent_then_extended": Failing("shared part", "b", "b = a * torch.tensor(2)", "c.backward()", "freed before"),
    "spent_then_extended_e": Failing("shared part", "c", "c = b * torch.tensor(3)", "c.backward()", "freed before"),
    "detached_loss": Failing("detached", "w", "w = z.detach() + 1", "", "no graph"),
    "running_loss": Failing("carried over", "total", "total = total + loss", "total.backward()", "freed before"),
    "rnn_state": Failing("carried over", "h", "h = cell(torch.ones(2, 3), h)", "loss.backward()", "freed before"),
    "rnn_module_state": Failing(
        "carried over", "net.h", "self.h = self.cell(x, self.h)", "loss.backward()", "freed before"
    ),
    "gan_attached_fake": Failing(
        "shared part", "fake", "fake = generator(torch.randn(8, 2))", "d_loss.backward()", "freed before"
    ),
    "cached_logits": Failing(
        "made once", "pi.logits", "loss = -pi.log_prob(action).mean()", "loss.backward()", "freed before"
    ),
    "made_with_the_object": Failing(
        "made once", "self.prior", "self.prior = self.w.exp().sum()", "loss.backward()", "freed before"
    ),
    "embedded_before_the_epochs": Failing(
        "made once", "table", "table = emb(torch.arange(10)).tanh()", "loss.backward()", "freed before"
    ),
    "lbfgs_closure": Failing("made once", "pred", "pred = (A @ w).tanh()", "loss.backward()", "freed before"),
    "list_of_states": Failing(
        "carried over", "hs[1]", "hs.append(cell(torch.randn(2, 3), hs[-1]))", "loss.backward()", "freed before"
    ),
    "replayed_values": Failing("carried over", "replay[0]", "value = q(s)", "loss.backward()", "freed before"),
    "gan_generator_first": Failing(
        "shared part", "fake", "fake = generator(torch.randn(4, 2))", "g_loss.backward()", "freed before"
    ),
    "gradient_then_loss": Failing(
        "shared part", "y", "y = (x**3).sum()", "(g,) = torch.autograd.grad(y, x)", "freed before"
    ),
    "own_function": Failing("made once", "y", "y = Square.apply(x)", "y.sum().backward()", "freed before"),
    "same_loss_twice": Failing("same loss twice", "loss", "loss = a.exp().sum()", "loss.backward()", "freed before"),
    "changed_in_place": Failing("changed value", "s", "s += 1", "", "changed value"),
    "stepped_too_early": Failing("changed parameter", "model.2.weight", "optimizer.step()", "", "changed parameter"),
    "under_no_grad": Failing("gradients off", "loss", "b = a * 2", "", "no graph"),
    "constant_gradient": Failing(
        "zero derivative", "penalty", "(g,) = torch.autograd.grad(y, x, create_graph=True)", "", "no graph"
    ),
    "gradient_without_graph": Failing("first gradient", "penalty", "(g,) = torch.autograd.grad(y, x)", "", "no graph"),
    "not_used": Failing("not used", "w", "", "", "not used"),
}
FINE = [
    "lbfgs_works",
    "reused_works",
    "losses_at_layers_retained",
    "deleted_factor",
    "retained_twice",
    "second_order_claim",
]
OWN = ["crashes", "exits"]
WORDED = {"cut_inside_f": r"cut at +cut_inside_f\.py:15 +return h / h\.detach\(\)(?s:.*)helps: drop the detach\(\)"}

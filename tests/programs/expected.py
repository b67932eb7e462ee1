"""What must be said of each program here by `hodiff explain`, or that nothing is."""


class Failing:
    """What must be said: the cause, the variable, text of the lines, and words of the first fix; never the last."""

    def __init__(self, cause, variable, created, freed, fix, never="", after=None):
        self.cause, self.variable, self.created, self.freed = cause, variable, created, freed
        self.fix, self.never = fix, never
        self.after = cause if after is None else after  # what explain() says with nothing recorded


FAILING = {
    "reused_in_loop": Failing("hoisted", "y", "y = t @ a", "loss.backward()", "into the loop"),
    "hoisted_and_updated": Failing(
        "hoisted", "y", "y = t @ a", "loss.backward()", "into the loop", "retain_graph=True"
    ),
    "shared_b": Failing("two losses", "c", "c = b * 2", "d.backward()", "(d + e).backward()"),
    "shared_b_retained": Failing("two losses", "c", "c = b * 2", "d.backward()  # also fine", "(d + e)"),
    "losses_at_layers": Failing(
        "two losses", "features", "features = trunk(x).tanh()", "loss1.backward()", "(loss1 + loss2).backward()"
    ),
    "spent_then_extended": Failing("two losses", "b", "b = a * torch.tensor(2)", "c.backward()", "(c + d)"),
    "spent_then_extended_e": Failing("two losses", "c", "c = b * torch.tensor(3)", "c.backward()", "(c + e)"),
    "detached_loss": Failing("detached", "w", "w = z.detach() + 1", "", "remove the detach()", "retain_graph"),
    "running_loss": Failing(
        "carried", "total", "total = total + loss", "total.backward()", "total = total.detach()", "retain_graph"
    ),
    "rnn_state": Failing(
        "carried", "h", "h = cell(torch.ones(2, 3), h)", "loss.backward()", "h = h.detach()", "retain"
    ),
    "rnn_module_state": Failing(
        "carried", "net.h", "self.h = self.cell(x, self.h)", "loss.backward()", "net.h.detach()", "retain_graph"
    ),
    "gan_attached_fake": Failing(
        "two losses", "fake", "fake = generator(torch.randn(8, 2))", "d_loss.backward()", "fake.detach()", "one pass"
    ),
    "cached_logits": Failing(
        "cached", "pi.logits", "loss = -pi.log_prob(action).mean()", "loss.backward()", "create the object `pi` again"
    ),
    "made_with_the_object": Failing(
        "hoisted",
        "self.prior",
        "self.prior = self.w.exp().sum()",
        "loss.backward()",
        "If so, compute it again",
        "retain_graph=True",
    ),
    "embedded_before_the_epochs": Failing(
        "hoisted",
        "table",
        "table = emb(torch.arange(10)).tanh()",
        "loss.backward()",
        "into the loop",
        "retain_graph=True",
    ),
    "lbfgs_closure": Failing(
        "hoisted", "pred", "pred = (A @ w).tanh()", "loss.backward()", "into closure()", "retain_graph=True"
    ),
    "list_of_states": Failing(
        "stored",
        "hs[1]",
        "hs.append(cell(torch.randn(2, 3), hs[-1]))",
        "loss.backward()",
        "hs[:] = [",
        "retain_graph",
        "carried",
    ),
    "replayed_values": Failing(
        "stored", "replay[0]", "value = q(s)", "loss.backward()", "put into `replay`", "retain_graph", "carried"
    ),
    "gan_generator_first": Failing(
        "two losses",
        "fake",
        "fake = generator(torch.randn(4, 2))",
        "g_loss.backward()",
        "fake.detach()",
        "retain_graph=True",
    ),
    "gradient_then_loss": Failing(
        "two losses", "y", "y = (x**3).sum()", "(g,) = torch.autograd.grad(y, x)", "hodiff.grad(y, ...)", "one pass"
    ),
    "own_function": Failing("hoisted", "y", "y = Square.apply(x)", "y.sum().backward()", "into the loop"),
    "same_loss_twice": Failing(
        "same loss twice", "loss", "loss = a.exp().sum()", "loss.backward()", "compute `loss` again"
    ),
    "changed_in_place": Failing("changed in place", "s", "s += 1", "", "s = s.clone()", "retain_graph=True"),
    "stepped_too_early": Failing(
        "changed in place", "model.2.weight", "optimizer.step()", "", "compute `loss` again after", "retain_graph=True"
    ),
    "under_no_grad": Failing("no_grad", "loss", "b = a * 2", "", "outside the no_grad block", "retain_graph"),
    "constant_gradient": Failing(
        "constant gradient",
        "penalty",
        "(g,) = torch.autograd.grad(y, x, create_graph=True)",
        "",
        "zero",
        "retain_graph",
    ),
    "gradient_without_graph": Failing(
        "gradient without create_graph", "penalty", "(g,) = torch.autograd.grad(y, x)", "", "create_graph=True"
    ),
    "not_used": Failing("not used", "w", "", "", "allow_unused=True", "retain_graph"),
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
WORDED = {"cut_inside_f": r"cut at +cut_inside_f\.py:15 +return h / h\.detach\(\)(?s:.*)fix: drop the detach\(\)"}

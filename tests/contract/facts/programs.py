"""Programs that fail, written at random, and what is true of each by construction.

A `Writer` writes the lines and knows, by a calculation of its own, what becomes of each value: the
leaves that its graph reaches, the cuts that entered it, which pass freed it, which lines changed it.
So `Program.truth` is known without running anything. The families:

* `cuts`: the loss has no graph; one to three cuts in series, of all kinds, and cuts beside the way.
* `shared`: a pass needs what an earlier pass has freed.
* `changed`: a value or a parameter was changed in place after its use, once or several times.
* `frozen`: the loss has no graph, and nothing was cut.
* `none`: a gradient is read that is None.
* `unused`: a derivative is asked for by something that the loss does not depend on.
* `growth`: a loop that runs, and of which something may hold the graphs of all iterations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cut:
    """A place where a graph ended.

    Attributes:
        mark: Of the line that cut it, or of any of them where two lines do so together.
        leaves: What lies behind it, as written in the program.
        left: Whether a value left PyTorch there, as a number or for NumPy; no record can tell which
            value came of it.
        behind: The cuts that entered what lies behind it.
        off: The mark of the line that had switched gradients off.
    """

    mark: str
    leaves: frozenset[str]
    behind: frozenset[Cut] = frozenset()
    off: str = ""
    left: bool = False

    def all(self, *, known: bool = False) -> frozenset[Cut]:
        """This cut and those behind it; with `known`, those that a record can tell."""
        if known and self.left:
            return frozenset()
        return frozenset({self}).union(*(cut.all(known=known) for cut in self.behind))


@dataclass(frozen=True)
class Value:
    """A value of the program: as written, the leaves that its graph reaches, the cuts that entered it."""

    name: str
    leaves: frozenset[str] = frozenset()
    cuts: frozenset[Cut] = frozenset()

    @property
    def graph(self) -> bool:
        """Whether it has a graph, or is a leaf."""
        return bool(self.leaves)


@dataclass(frozen=True)
class Part:
    """A value whose graph a pass has freed.

    Attributes:
        name: Its variable.
        made: The line that made it.
        leaves: Those that it was computed from.
        freed: The line of the pass.
        turn: How often that line had asked for a pass before.
    """

    name: str
    made: str
    leaves: frozenset[str]
    freed: str
    turn: int = 0


@dataclass(frozen=True)
class Truth:
    """What is true of a program. Marks name lines; names are as the program writes them.

    Attributes:
        error: A part of PyTorch's message; empty if nothing is raised.
        failed: The line that raises.
        cuts: Those on the way to the loss, the nearest; what is behind them hangs on them.
        owners: The leaves that each optimizer steps.
        parts: The values whose graphs an earlier pass has freed.
        turn: How often the line that raises had asked for a pass before.
        moved: The leaves below them that an optimizer stepped since then.
        stepped: The line of that step.
        changed: The lines that changed the value after it was used.
        variable: The names of what was changed.
        saved: The line that used it, or that made what has no gradient.
        last: The last pass before a gradient was read.
        unused: What the loss does not depend on.
        reached: The leaves that it does depend on.
        holder: What holds graphs that grow; empty if nothing does.
        grows: The line that puts them there.
        count: How many.
        untrained: Parameters that an optimizer stepped, and that never had a gradient.
    """

    error: str = ""
    failed: str = ""
    cuts: frozenset[Cut] = frozenset()
    owners: tuple[tuple[str, frozenset[str]], ...] = ()
    parts: tuple[Part, ...] = ()
    turn: int = 0
    moved: frozenset[str] = frozenset()
    stepped: str = ""
    changed: tuple[str, ...] = ()
    variable: frozenset[str] = frozenset()
    saved: str = ""
    last: str = ""
    unused: frozenset[str] = frozenset()
    reached: frozenset[str] = frozenset()
    holder: str = ""
    grows: str = ""
    count: int = 0
    untrained: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Program:
    """The text of a program, the numbers of its marked lines, and its truth."""

    seed: int
    family: str
    text: str
    lines: dict[str, int]
    truth: Truth


NO_GRAPH = "does not require grad"
FREED = "second time"
CHANGED = "modified by an inplace operation"
UNUSED = "appears to not have been used"
NONE = "'NoneType' object has no attribute"

_MARK = re.compile(r"  #@(\w+)$")


@dataclass
class Writer:
    """Writes a program; `value` calculates what becomes of what it writes."""

    random: random.Random
    helpers: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)
    data: list[Value] = field(default_factory=list)
    modules: dict[str, frozenset[str]] = field(default_factory=dict)
    owners: dict[str, frozenset[str]] = field(default_factory=dict)
    outputs: dict[str, frozenset[str]] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    number: int = 0

    # --- text -------------------------------------------------------------------------------------

    def fresh(self, stem: str) -> str:
        """A name that the program has not used."""
        self.number += 1
        return f"{stem}{self.number}"

    def add(self, text: str, mark: str = "") -> str:
        """A line; returns its mark."""
        mark = mark or self.fresh("line")
        self.lines.append(f"{'    ' * self.depth}{text}  #@{mark}")
        return mark

    @contextmanager
    def block(self, text: str) -> Iterator[str]:
        """The lines of a block, whose first line is given."""
        mark = self.add(text)
        self.depth += 1
        yield mark
        self.depth -= 1

    def helper(self, lines: list[str]) -> None:
        """A function of the program; its lines carry their marks."""
        self.helpers += ["", "", *lines]

    def program(self, seed: int, family: str, truth: Truth) -> Program:
        """What was written: at the top level, in a function, or in a method."""
        form = self.random.choice(("module", "module", "function", "method"))
        head = ["import torch", "from torch import nn", *self.helpers, ""]
        if form == "module":
            body = self.lines
        elif form == "function":
            body = ["", "def main():", *(f"    {line}" for line in self.lines), "", "", "main()"]
        else:
            inner = [f"        {line}" for line in self.lines]
            body = ["", "class Job:", "    def run(self):", *inner, "", "", "Job().run()"]
        text, marks = [], {}
        for number, line in enumerate([*head, *body], 1):
            match = _MARK.search(line)
            if match:
                marks[match[1]] = number
            text.append(_MARK.sub("", line))
        return Program(seed, family, "\n".join(text) + "\n", marks, truth)

    # --- what there is at the beginning -----------------------------------------------------------

    def begin(self) -> None:
        """Leaves in variables, lists, dicts, objects and modules; data; optimizers of some of the leaves."""
        self.add("torch.manual_seed(0)")
        for kind in self.random.sample(
            ("plain", "list", "dict", "module", "deep", "object"), self.random.randint(2, 4)
        ):
            getattr(self, f"_{kind}")()
        for _ in range(2):
            name = self.fresh("x")
            self.add(f"{name} = torch.rand(3)")
            self.data.append(Value(name))
        self._optimizers()

    def _leaf(self, *names: str) -> None:
        self.leaves += [Value(name, frozenset({name})) for name in names]

    def _plain(self) -> None:
        for _ in range(2):
            name = self.fresh("w")
            self.made[name] = self.add(f"{name} = {self.random.choice(LEAVES)}")
            self._leaf(name)

    def _list(self) -> None:
        name = self.fresh("ws")
        self.add(f"{name} = [torch.rand(3, requires_grad=True) for _ in range(2)]")
        self._leaf(f"{name}[0]", f"{name}[1]")

    def _dict(self) -> None:
        name = self.fresh("params")
        self.add(f"{name} = {{key: torch.rand(3, requires_grad=True) for key in ('a', 'b')}}")
        self._leaf(f"{name}['a']", f"{name}['b']")

    def _module(self) -> None:
        name = self.fresh("net")
        self.add(f"{name} = nn.Linear(3, 3)")
        self.modules[name] = frozenset({f"{name}.weight", f"{name}.bias"})

    def _deep(self) -> None:
        name = self.fresh("net")
        self.add(f"{name} = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))")
        self.modules[name] = frozenset(f"{name}[{at}].{which}" for at in (0, 2) for which in ("weight", "bias"))

    def _object(self) -> None:
        name = self.fresh("box")
        self.add(f"{name} = nn.Module(); {name}.scale = nn.Parameter(torch.rand(3))")
        self._leaf(f"{name}.scale")

    def _optimizers(self) -> None:
        given = [(value.name, value.leaves) for value in self.leaves]
        given += [(f"*{name}.parameters()", leaves) for name, leaves in self.modules.items()]
        self.random.shuffle(given)
        for _ in range(self.random.randint(1, 2)):
            share, given = given[: len(given) // 2 + 1], given[len(given) // 2 + 1 :]
            if share:
                name = self.fresh("opt")
                kind = self.random.choice(("SGD", "Adam", "RMSprop"))
                self.add(f"{name} = torch.optim.{kind}([{', '.join(text for text, _ in share)}], lr=0.01)")
                self.owners[name] = frozenset().union(*(leaves for _, leaves in share))

    @property
    def owned(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The leaves that each optimizer steps."""
        return tuple(self.owners.items())

    # --- operations -------------------------------------------------------------------------------

    def operation(self, *given: Value) -> Value:
        """A value computed from others, each of which it depends on; its derivative is not constant."""
        first, rest = given[0], given[1:]
        text, leaves = first.name, first.leaves
        for each in rest:
            text = f"({text} * {each.name} + {each.name})"
        apart = [name for name, held in self.modules.items() if not held & leaves]
        if apart and first.graph and self.random.random() < 0.3:
            module = self.random.choice(apart)
            text, leaves = f"{module}({text})", leaves | self.modules[module]
        else:
            text = self.random.choice(SMOOTH).format(text)
        leaves = leaves.union(*(each.leaves for each in rest))
        name = self.fresh("v")
        self.add(f"{name} = {self._by_helper(text, leaves)}")
        return Value(name, leaves, frozenset().union(*(each.cuts for each in given)))

    def _by_helper(self, text: str, leaves: frozenset[str]) -> str:
        if self.random.random() < 0.2:
            name = self.fresh("scaled")
            self.helper([f"def {name}(a):", "    return a * a.tanh()"])
            return f"{name}({text})"
        return text

    def source(self, avoid: frozenset[str] = frozenset()) -> Value:
        """A leaf, or the output of a module, whose leaves are none of some."""
        single = [value for value in self.leaves if not value.leaves & avoid]
        modules = [name for name, leaves in self.modules.items() if not leaves & avoid]
        if not single and not modules:
            name = self.fresh("w")
            self.add(f"{name} = torch.rand(3, requires_grad=True)")
            self._leaf(name)
            return self.leaves[-1]
        if single and (not modules or self.random.random() < 0.6):
            return self.random.choice(single)
        module = self.random.choice(modules)
        name = self.fresh("v")
        self.add(f"{name} = {module}({self.random.choice(self.data).name})")
        self.outputs[name] = self.modules[module]
        return Value(name, self.modules[module])

    def constant(self) -> Value:
        """A value of no graph."""
        return self.random.choice(self.data)

    def trained(self) -> None:
        """Some right steps of another loss, before what fails."""
        if not self.owners or self.random.random() < 0.5:
            return
        name, leaves = self.random.choice(list(self.owners.items()))
        own = [value for value in self.leaves if value.leaves <= leaves]
        own += [Value(f"{net}({self.constant().name})", held) for net, held in self.modules.items() if held <= leaves]
        with self.block(f"for step in range({self.random.randint(1, 3)}):"):
            loss = self.fresh("loss")
            self.add(f"{loss} = sum(each.square().sum() for each in ({', '.join(each.name for each in own)},))")
            self.add(f"{name}.zero_grad()")
            self.add(f"{loss}.backward()")
            self.add(f"{name}.step()")

    # --- cuts -------------------------------------------------------------------------------------

    def cut(self, value: Value, kind: str = "") -> Value:
        """A value whose graph ends here."""
        return getattr(self, f"_{kind or self.random.choice(CUTS)}")(value)

    def _ended(
        self, name: str, value: Value, mark: str, *, off: str = "", also: Value | None = None, left: bool = False
    ) -> Value:
        more = also.leaves if also is not None else frozenset()
        cut = Cut(mark, value.leaves | more, value.cuts, off, left)
        return Value(name, frozenset(), frozenset({cut}))

    def _detached(self, value: Value) -> Value:
        name = self.fresh("c")
        text = self.random.choice(("{}.detach()", "{}.data", "{}.clone().detach()", "{}.detach().clone()"))
        return self._ended(name, value, self.add(f"{name} = {text.format(value.name)}"))

    def _by_function(self, value: Value) -> Value:
        """By a helper that detaches, and is called for something else as well, before and after."""
        helper, mark = self.fresh("constant"), self.fresh("cut")
        self.helper([f"def {helper}(a):", f"    return a.detach() * 2  #@{mark}"])
        name = self.fresh("c")
        if self.random.random() < 0.6:
            self.add(f"{self.fresh('aside')} = {helper}({self.source(value.leaves).name})")
        self.add(f"{name} = {helper}({value.name})")
        if self.random.random() < 0.3:
            self.add(f"{self.fresh('aside')} = {helper}({self.source(value.leaves).name})")
        return self._ended(name, value, mark)

    def _in_forward(self, value: Value) -> Value:
        """In the forward of a module of the program's own."""
        kind, mark, name, net = self.fresh("Net"), self.fresh("cut"), self.fresh("c"), self.fresh("net")
        off = ""
        if self.random.random() < 0.5:
            lines = [f"        return a.detach().tanh()  #@{mark}"]
        else:
            off = self.fresh("off")
            lines = [f"        with torch.no_grad():  #@{off}", f"            return a.tanh()  #@{mark}"]
        self.helper([f"class {kind}(nn.Module):", "    def forward(self, a):", *lines])
        self.add(f"{net} = {kind}()")
        if self.random.random() < 0.5:
            self.add(f"{self.fresh('aside')} = {net}({self.source(value.leaves).name})")
        self.add(f"{name} = {net}({value.name})")
        return self._ended(name, value, mark, off=off)

    def _stored(self, value: Value) -> Value:
        """In a container, which is read where it is needed."""
        ended, store = self.cut(value), self.fresh("store")
        key = self.random.choice(("'a'", "0", "(1, 'a')"))
        self.add(f"{store} = {{{key}: {ended.name}}}")
        return Value(f"{store}[{key}]", frozenset(), ended.cuts)

    def _in_loop(self, value: Value) -> Value:
        """In a loop over several values, of which all enter the result, or the last does."""
        others = [self.source(value.leaves).name, self.source(value.leaves).name]
        leaves = [self._leaves_of(other) for other in others]
        each, name = self.fresh("each"), self.fresh("c")
        keeps = self.random.random() < 0.5
        self.add(f"{name} = torch.zeros(3)")
        with self.block(f"for {each} in ({', '.join(others)}, {value.name}):"):
            text = f"{name} + ({each} * 2).detach()" if keeps else f"({each} * 2).detach()"
            mark = self.add(f"{name} = {text}")
        cuts = [Cut(mark, value.leaves, value.cuts)]
        cuts += [Cut(mark, each) for each in leaves] if keeps else []
        return Value(name, frozenset(), frozenset(cuts))

    def _leaves_of(self, name: str) -> frozenset[str]:
        return self.outputs.get(name, frozenset({name}))

    def _off_context(self, value: Value) -> Value:
        """In a block under which gradients are off; maybe with other blocks around or before."""
        name = self.fresh("c")
        texts = ["torch.no_grad()", "torch.set_grad_enabled(False)"]
        phase = self.fresh("phase")
        self.add(f"{phase} = 'val'")
        texts.append(f"torch.set_grad_enabled({phase} == 'train')")
        if self.random.random() < 0.3:
            with self.block("with torch.no_grad():"):
                self.add("pass")
        text = self.random.choice(texts)
        around = self.random.random() < 0.3
        if around:
            with self.block("with torch.enable_grad():"), self.block(f"with {text}:") as off:
                mark = self.add(f"{name} = {value.name} * 2")
        else:
            with self.block(f"with {text}:") as off:
                mark = self.add(f"{name} = {value.name} * 2")
        return self._ended(name, value, mark, off=off)

    def _off_in_function(self, value: Value) -> Value:
        """In a function that a decorator runs with gradients off."""
        helper, mark, off = self.fresh("frozen"), self.fresh("cut"), self.fresh("off")
        decorator = self.random.choice(("@torch.no_grad()", "@torch.set_grad_enabled(False)"))
        self.helper([f"{decorator}  #@{off}", f"def {helper}(a):", f"    return a.sin() + 1  #@{mark}"])
        name = self.fresh("c")
        self.add(f"{name} = {helper}({value.name})")
        return self._ended(name, value, mark, off=off)

    def _off_by_statement(self, value: Value) -> Value:
        name = self.fresh("c")
        off = self.add("torch.set_grad_enabled(False)")
        mark = self.add(f"{name} = {value.name}.tanh()")
        self.add("torch.set_grad_enabled(True)")
        return self._ended(name, value, mark, off=off)

    def _inference(self, value: Value) -> Value:
        name, copy = self.fresh("c"), self.fresh("c")
        if self.random.random() < 0.5:
            with self.block("with torch.inference_mode():") as off:
                mark = self.add(f"{name} = {value.name}.exp()")
        else:
            helper, mark, off = self.fresh("predict"), self.fresh("cut"), self.fresh("off")
            self.helper([f"@torch.inference_mode()  #@{off}", f"def {helper}(a):", f"    return a.exp()  #@{mark}"])
            self.add(f"{name} = {helper}({value.name})")
        self.add(f"{copy} = {name}.clone()")
        return self._ended(copy, value, mark, off=off)

    def _numbers(self, value: Value) -> Value:
        name = self.fresh("c")
        text = self.random.choice(
            (
                "torch.tensor({}.tolist())",
                "torch.from_numpy({}.detach().numpy())",
                "torch.tensor([{}.sum().item(), 1.0, 2.0])",
                "torch.as_tensor({}.detach().numpy()) + 1",
            )
        )
        return self._ended(name, value, self.add(f"{name} = {text.format(value.name)}"), left=True)

    def _discrete(self, value: Value) -> Value:
        name = self.fresh("c")
        text = self.random.choice(("({} > 0.5).float()", "{}.argsort().float()", "{}.long().float()"))
        return self._ended(name, value, self.add(f"{name} = {text.format(value.name)}"))

    def _gradient(self, value: Value) -> Value:
        """A gradient by the value, taken without create_graph."""
        name, other = self.fresh("g"), self.source(value.leaves)
        mark = self.add(f"({name},) = torch.autograd.grad(({value.name} * {other.name}).sin().sum(), {value.name})")
        return self._ended(name, value, mark, also=other)

    def _linear(self, value: Value) -> Value:
        """A gradient of a linear function: it has no graph, although one was asked for."""
        name = self.fresh("g")
        mark = self.add(f"({name},) = torch.autograd.grad(({value.name} * 3).sum(), {value.name}, create_graph=True)")
        return self._ended(name, value, mark)

    def _read_gradient(self, value: Value) -> Value:
        """`.grad` of a fresh leaf."""
        leaf, name = self.leaf_of(value), self.fresh("g")
        self.add(
            f"({leaf.name} * {leaf.name}).sin().sum().backward(); {name} = {leaf.name}.grad", mark := self.fresh("cut")
        )
        return self._ended(name, leaf, mark)

    def leaf_of(self, value: Value) -> Value:
        """A leaf of the same value, at which a graph ends and another begins."""
        name = self.fresh("u")
        text = self.random.choice(("{}.detach().requires_grad_()", "{}.detach().clone().requires_grad_(True)"))
        mark = self.add(f"{name} = {text.format(value.name)}")
        cuts = value.cuts if not value.graph else frozenset({Cut(mark, value.leaves, value.cuts)})
        return Value(name, frozenset({name}), cuts)

    def fails(self, text: str) -> str:
        """The line that raises."""
        return self.add(text)


LEAVES = (
    "torch.rand(3, requires_grad=True)",
    "nn.Parameter(torch.rand(3))",
    "torch.ones(3).requires_grad_()",
    "torch.full((3,), 0.5, requires_grad=True)",
)
SMOOTH = ("{}.sin()", "torch.tanh({})", "{}.exp()", "({}).square()", "torch.sigmoid({})")
CUTS = (
    "detached",
    "by_function",
    "in_forward",
    "stored",
    "in_loop",
    "off_context",
    "off_in_function",
    "off_by_statement",
    "inference",
    "numbers",
    "discrete",
    "gradient",
    "linear",
    "read_gradient",
)


# --- the families ---------------------------------------------------------------------------------


def cuts(w: Writer) -> Truth:
    """One to three cuts in series, maybe a second way with cuts of its own, and cuts beside the way."""
    ways = [_way(w) for _ in range(w.random.choice((1, 1, 1, 2)))]
    if w.random.random() < 0.4:  # beside the way
        w.cut(w.operation(w.source()))
    value = ways[0] if len(ways) == 1 else w.operation(*ways)
    if w.random.random() < 0.5:
        value = w.operation(value, w.constant())
    loss = w.fresh("loss")
    w.add(f"{loss} = {value.name}.sum()")
    asked = w.random.choice(
        [leaf.name for leaf in w.leaves] or [f"{name}.weight" for name in w.modules if "[" not in name]
    )
    form = w.random.choice(
        (f"{loss}.backward()", f"torch.autograd.backward({loss})", f"torch.autograd.grad({loss}, {asked})")
    )
    if "grad(" in form and not w.leaves:
        form = f"{loss}.backward()"
    return Truth(NO_GRAPH, w.fails(form), value.cuts, w.owned)


def frozen(w: Writer) -> Truth:
    """All that the loss was computed from is frozen, or data."""
    kind = w.random.choice(("module", "parameter", "data"))
    loss = w.fresh("loss")
    cut, operations = frozenset[Cut](), "{}.square().sum()"
    if kind == "module":
        w._module()
        net = list(w.modules)[-1]
        switch = w.random.choice(
            (f"{net}.requires_grad_(False)", f"for p in {net}.parameters(): p.requires_grad = False")
        )
        off = w.add(switch)
        mark = w.add(f"{loss} = {operations.format(f'{net}({w.constant().name})')}")
        cut = frozenset({Cut(mark, w.modules[net], off=off)})
    elif kind == "parameter":
        name = w.fresh("p")
        w.add(f"{name} = nn.Parameter(torch.rand(3), requires_grad=False)")
        mark = w.add(f"{loss} = {operations.format(f'({name} * {w.constant().name})')}")
        cut = frozenset({Cut(mark, frozenset({name}))})
    else:
        w.add(f"{loss} = {operations.format(w.constant().name)}")
    return Truth(NO_GRAPH, w.fails(f"{loss}.backward()"), cut, w.owned)


def _way(w: Writer) -> Value:
    value = w.operation(w.source())
    for _ in range(w.random.choice((0, 0, 1, 2))):
        if w.random.random() < 0.4:
            leaf = w.leaf_of(value)
            value = w.operation(leaf)
        else:
            ended = w.cut(value)
            other = w.source(frozenset().union(*(cut.leaves for each in ended.cuts for cut in each.all())))
            value = w.operation(other, ended)
    return w.cut(value)


def shared(w: Writer) -> Truth:
    """A pass needs what an earlier one has freed."""
    form = w.random.choice((_two_losses, _same_loss, _hoisted, _carried, _two_parts, _adversarial, _in_store))
    return form(w)


def _part(w: Writer) -> tuple[Value, str]:
    """A value that several losses share, and the line that makes it."""
    value = w.operation(w.source())
    name = w.fresh("part")
    mark = w.add(f"{name} = {w.random.choice(SMOOTH).format(value.name)}")
    return Value(name, value.leaves), mark


def _loss(w: Writer, *parts: Value) -> Value:
    apart = frozenset().union(*(part.leaves for part in parts))
    value = w.operation(*parts, *([w.source(apart)] if w.random.random() < 0.4 else []))
    name = w.fresh("loss")
    w.add(f"{name} = {value.name}.square().sum()")
    return Value(name, value.leaves)


def _pass(w: Writer, loss: Value, by: frozenset[str], *, keep: bool = False) -> str:
    """A pass of a loss, through the graph above some leaves."""
    kept = ", retain_graph=True" if keep else ""
    forms = [f"{loss.name}.backward({kept[2:]})", f"torch.autograd.backward({loss.name}{kept})"]
    forms.append(f"torch.autograd.grad({loss.name}, [{', '.join(sorted(by))}]{kept})")
    return w.add(w.random.choice(forms))


def _two_losses(w: Writer) -> Truth:
    part, made = _part(w)
    first = _loss(w, part)
    if w.random.random() < 0.4:
        _pass(w, first, part.leaves, keep=True)
    second = _loss(w, part)
    if w.random.random() < 0.4:
        _pass(w, second, part.leaves, keep=True)
    freed = _pass(w, first, part.leaves)
    if w.random.random() < 0.4:  # of something else
        other = _loss(w, w.operation(w.source()))
        _pass(w, other, other.leaves)
    moved, stepped = _step(w, part) if w.random.random() < 0.5 else (frozenset[str](), "")
    failed = _pass(w, second, part.leaves)
    parts = (Part(part.name, made, part.leaves, freed),)
    return Truth(FREED, failed, owners=w.owned, parts=parts, moved=moved, stepped=stepped)


def _step(w: Writer, part: Value) -> tuple[frozenset[str], str]:
    """An optimizer steps a leaf below the part; what is above it has others."""
    leaves = [leaf for leaf in w.leaves if leaf.leaves <= part.leaves]
    if not leaves:
        return frozenset(), ""
    leaf, opt = w.random.choice(leaves).name, w.fresh("opt")
    w.owners[opt] = frozenset({leaf})
    w.add(f"{opt} = torch.optim.SGD([{leaf}], lr=0.1)")
    w.add(f"{leaf}.grad = torch.ones(3)")
    return frozenset({leaf}), w.add(f"{opt}.step()")


def _same_loss(w: Writer) -> Truth:
    part, _ = _part(w)
    loss = w.fresh("loss")
    made = w.add(f"{loss} = {part.name}.square().sum()")
    if w.random.random() < 0.4:
        _pass(w, Value(loss), part.leaves, keep=True)
    freed = _pass(w, Value(loss), part.leaves)
    failed = _pass(w, Value(loss), part.leaves)
    return Truth(FREED, failed, owners=w.owned, parts=(Part(loss, made, part.leaves, freed),))


def _hoisted(w: Writer) -> Truth:
    part, made = _part(w)
    kept = w.random.randint(0, 2)
    with w.block(f"for step in range({kept + 2}):"):
        loss = _loss(w, part)
        keep = f"retain_graph=step < {kept}" if kept else ""
        mark = w.add(f"{loss.name}.backward({keep})")
    parts = (Part(part.name, made, part.leaves, mark, kept),)
    return Truth(FREED, mark, owners=w.owned, parts=parts, turn=kept + 1)


def _carried(w: Writer) -> Truth:
    w._plain()
    source, state, loss = w.leaves[-1], w.fresh("state"), w.fresh("loss")
    w.add(f"{state} = torch.zeros(3)")
    with w.block("for step in range(4):"):
        made = w.add(f"{state} = torch.tanh({state} * {source.name} + {source.name})")
        w.add(f"{loss} = {state}.square().sum()")
        mark = w.add(f"{loss}.backward()")
    return Truth(FREED, mark, owners=w.owned, parts=(Part(state, made, source.leaves, mark),), turn=1)


def _two_parts(w: Writer) -> Truth:
    """Two parts, freed by two passes."""
    values, parts = [], []
    for _ in range(2):
        w._plain()
        leaf, name = w.leaves[-1], w.fresh("part")
        made = w.add(f"{name} = {w.random.choice(SMOOTH).format(leaf.name)}")
        values.append((Value(name, leaf.leaves), made))
    losses = [_loss(w, value) for value, _ in values]
    both = _loss(w, *(value for value, _ in values))
    for loss, (value, made) in zip(losses, values, strict=True):
        mark = w.add(f"torch.autograd.grad({loss.name}, [{', '.join(value.leaves)}])")
        parts.append(Part(value.name, made, value.leaves, mark))
    failed = w.add(f"{both.name}.backward()")
    return Truth(FREED, failed, owners=w.owned, parts=tuple(parts))


def _adversarial(w: Writer) -> Truth:
    """A discriminator's pass frees the generator's part, and steps; its second output is of its new parameters."""
    made_by, judge, opt = w.fresh("gen"), w.fresh("disc"), w.fresh("opt")
    for net in (made_by, judge):
        w.add(f"{net} = nn.Linear(3, 3)")
        w.modules[net] = frozenset({f"{net}.weight", f"{net}.bias"})
    w.add(f"{opt} = torch.optim.SGD({judge}.parameters(), lr=0.1)")
    w.owners[opt] = w.modules[judge]
    fake, loss, second = w.fresh("fake"), w.fresh("loss"), w.fresh("loss")
    made = w.add(f"{fake} = {made_by}({w.constant().name}).tanh()")
    w.add(f"{loss} = {judge}({fake}).square().sum()")
    freed = w.add(f"{loss}.backward()")
    w.add(f"{opt}.step()")
    w.add(f"{second} = {judge}({fake}).exp().sum()")
    failed = w.add(f"{second}.backward()")
    return Truth(FREED, failed, owners=w.owned, parts=(Part(fake, made, w.modules[made_by], freed),))


def _in_store(w: Writer) -> Truth:
    """A value that is computed once, by a function, and kept in a container or an object."""
    part = w.operation(w.source())
    store = w.fresh("store")
    text, path = w.random.choice((("{}", f"{store}['a']"), ("nn.Module()", f"{store}.part"), ("[0]", f"{store}[0]")))
    w.add(f"{store} = {text}")
    made = w.add(f"{path} = ({part.name} * 1.5).exp()")
    with w.block("for step in range(3):"):
        loss = _loss(w, Value(path, part.leaves))
        mark = w.add(f"{loss.name}.backward()")
    return Truth(FREED, mark, owners=w.owned, parts=(Part(path, made, part.leaves, mark),), turn=1)


def changed(w: Writer) -> Truth:
    """Changed in place after its use: a value, or a parameter; changes before the use do no harm."""
    return w.random.choice((_changed_value, _changed_value, _changed_leaf, _stepped))(w)


CHANGES = ("{}.mul_(2)", "{} += 1", "{}[0] = 0", "{}.clamp_(0, 1)", "{}[1:].add_(1)", "{}.copy_(torch.ones(3))")


def _changed_value(w: Writer) -> Truth:
    name, used = w.fresh("value"), w.fresh("v")
    w.add(f"{name} = {w.operation(w.source()).name} * 2")
    for _ in range(w.random.choice((0, 0, 1, 2))):
        w.add(w.random.choice(CHANGES).format(name))
    text = w.random.choice(("{}.sin()", "{}.square()", "{}.log1p()", "torch.cos({})"))
    saved = w.add(f"{used} = {text.format(name)}")
    names = {name}
    marks = []
    other = w.fresh("other")
    w.add(f"{other} = {name} * 1")
    for _ in range(w.random.randint(1, 4)):
        target = name
        if w.random.random() < 0.3:
            target = w.fresh("view")
            text = w.random.choice(("{}.view(3)", "{}.detach()", "{}[:]"))
            w.add(f"{target} = {text.format(name)}")
            names.add(target)
        if w.random.random() < 0.3:  # of another value, and a value of another name
            w.add(w.random.choice(CHANGES).format(other))
        if w.random.random() < 0.25:
            helper, mark = w.fresh("adjust"), w.fresh("change")
            w.helper([f"def {helper}(a):", f"    {w.random.choice(CHANGES).format('a')}  #@{mark}"])
            w.add(f"{helper}({target})")
            marks.append(mark)
        else:
            marks.append(w.add(w.random.choice(CHANGES).format(target)))
    failed = w.fails(f"{used}.sum().backward()")
    return Truth(CHANGED, failed, owners=w.owned, changed=tuple(marks), variable=frozenset(names), saved=saved)


def _changed_leaf(w: Writer) -> Truth:
    """A parameter, changed where gradients are off."""
    w._plain()
    leaf = w.leaves[-1]
    other = w.source(leaf.leaves)
    used = w.fresh("v")
    with w.block("with torch.no_grad():"):
        w.add(f"{leaf.name}.add_(0.1)")
    saved = w.add(f"{used} = {other.name} * {leaf.name}")
    marks = []
    for _ in range(w.random.randint(1, 3)):
        with w.block("with torch.no_grad():"):
            marks.append(w.add(w.random.choice(CHANGES).format(leaf.name)))
    failed = w.fails(f"{used}.sum().backward()")
    return Truth(CHANGED, failed, owners=w.owned, changed=tuple(marks), variable=leaf.leaves, saved=saved)


def _stepped(w: Writer) -> Truth:
    """A parameter that an optimizer has stepped since."""
    w._plain()
    leaf = w.leaves[-1]
    other = w.source(leaf.leaves)
    opt, used = w.fresh("opt"), w.fresh("v")
    w.add(f"{opt} = torch.optim.SGD([{leaf.name}], lr=0.1)")
    w.owners[opt] = leaf.leaves
    saved = w.add(f"{used} = {other.name} * {leaf.name}")
    with w.block(f"for step in range({(times := w.random.randint(1, 3))}):"):
        w.add(f"{opt}.zero_grad()")
        w.add(f"{leaf.name}.square().sum().backward()")
        mark = w.add(f"{opt}.step()")
    failed = w.fails(f"{used}.sum().backward()")
    return Truth(CHANGED, failed, owners=w.owned, changed=(mark,) * times, variable=leaf.leaves, saved=saved)


def unused(w: Writer) -> Truth:
    """A derivative by several things, some of which the loss does not depend on."""
    base = w.source()
    while base.name not in base.leaves:
        w._plain()
        base = w.leaves[-1]
    loss = w.fresh("loss")
    used, lacking, ended = [base.name], [], frozenset[Cut]()
    value = w.operation(base)
    for kind in w.random.sample(("leaf", "copy", "cut", "linear"), w.random.randint(1, 2)):
        w._plain()
        leaf = w.leaves[-1]
        if kind == "leaf":
            lacking.append(leaf.name)
        elif kind == "copy":  # made beside the way that leads to the loss
            copy = w.fresh("copy")
            w.add(f"{copy} = {leaf.name} * 1")
            value = w.operation(value, leaf)
            lacking.append(copy)
        elif kind == "cut":
            end = w.cut(leaf, "detached")
            value, ended = w.operation(value, end), ended | end.cuts
            lacking.append(leaf.name)
        else:  # the gradient of a linear function does not depend on where it is taken
            name = w.fresh("g")
            w.add(
                f"({name},) = torch.autograd.grad(({leaf.name} * {value.name}).sum(), {leaf.name}, create_graph=True)"
            )
            value = w.operation(Value(name, value.leaves, value.cuts))
            lacking.append(leaf.name)
    w.add(f"{loss} = {value.name}.sum()")
    asked = [*used, *lacking]
    w.random.shuffle(asked)
    failed = w.fails(f"torch.autograd.grad({loss}, [{', '.join(asked)}])")
    return Truth(UNUSED, failed, ended, w.owned, unused=frozenset(lacking), reached=value.leaves)


def none(w: Writer) -> Truth:
    """`.grad` is read and None: of what is no leaf, or of a leaf that no pass has reached."""
    w._plain()
    leaf, other = w.leaves[-2:]
    name, loss = w.fresh("y"), w.fresh("loss")
    w.made[name] = w.add(f"{name} = {leaf.name} * 2")
    w.add(f"{loss} = {name}.square().sum()")
    last = w.add(f"{loss}.backward()")
    asked = w.random.choice((name, other.name))
    text = w.random.choice(("{}.grad.sign()", "print({}.grad.norm())", "{}.grad.zero_()", "{}.grad.abs().max()"))
    failed = w.fails(text.format(asked))
    reached = leaf.leaves if asked == name else frozenset[str]()
    lines = {"saved": w.made[asked], "last": last}
    return Truth(NONE, failed, owners=w.owned, unused=frozenset({asked}), reached=reached, **lines)


def growth(w: Writer) -> Truth:
    """A loop of steps; something may keep what it computes, with its graph or without."""
    w._deep()
    net = list(w.modules)[-1]
    opt, kept = w.fresh("opt"), w.fresh("kept")
    untrained = frozenset[str]()
    if w.random.random() < 0.3:
        w._plain()
        untrained = w.leaves[-1].leaves
    given = [f"*{net}.parameters()", *untrained]
    w.add(f"{opt} = torch.optim.SGD([{', '.join(given)}], lr=0.01)")
    start, text, holder = w.random.choice(
        (
            ("[]", "{kept}.append({what})", "{kept}"),
            ("{{}}", "{kept}[step] = {what}", "{kept}"),
            ("{{}}", "{kept}.setdefault({net}, []).append({what})", "{kept}[<Sequential 0>]"),
            ("{{'a': [], 'b': []}}", "{kept}['b'].append({what})", "{kept}['b']"),
            ("0", "{kept} = {kept} + {what}", "{kept}"),
            ("0", "{kept} += {what}", "{kept}"),
            ("nn.Module(); {kept}.total = 0", "{kept}.total = {kept}.total + {what}", "{kept}.total"),
        )
    )
    w.add(f"{kept} = {start.format(kept=kept)}")
    what = w.random.choice(("loss", "loss", "out.sum()", "loss.detach()", "out.detach()", "loss.item()"))
    rounds = w.random.randint(14, 30)
    with w.block(f"for step in range({rounds}):"):
        w.add(f"out = {net}(torch.rand(4, 3))")
        w.add("loss = out.square().mean()")
        early = w.random.random() < 0.5
        mark = w.add(text.format(kept=kept, net=net, what=what)) if early else ""
        w.add(f"{opt}.zero_grad()")
        w.add("loss.backward()")
        w.add(f"{opt}.step()")
        mark = mark if early else w.add(text.format(kept=kept, net=net, what=what))
    if "detach" in what or "item" in what:
        return Truth(untrained=untrained)
    return Truth(holder=holder.format(kept=kept), grows=mark, count=rounds - 1, untrained=untrained)


FAMILIES: dict[str, Callable[[Writer], Truth]] = {
    "cuts": cuts,
    "frozen": frozen,
    "shared": shared,
    "changed": changed,
    "unused": unused,
    "none": none,
    "growth": growth,
}
WEIGHTS = (10, 1, 5, 4, 2, 1, 2)


def program(seed: int) -> Program:
    """The program of a number: the same each time."""
    numbers = random.Random(seed)
    family = numbers.choices(list(FAMILIES), WEIGHTS)[0]
    writer = Writer(numbers)
    writer.begin()
    writer.trained()
    truth = FAMILIES[family](writer)
    return writer.program(seed, family, truth)

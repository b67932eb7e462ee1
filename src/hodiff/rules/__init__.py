"""Update rules of optimisers as pure functions, for `hodiff.unroll`: equal to `torch.optim`, differentiable by all.

A rule maps parameters, gradients, its state and the number of the step (from 1) to new parameters and a new
state: `rule(params, grads, state, step) -> (params, state)`. Parameters are like the point; the state of the
first step is None. A function of yours with that signature is a rule as well.
"""

from hodiff.rules._optimisers import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rule

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rule"]

"""A loss module returns several losses in a dict; the value's still has the actor's graph.

After https://github.com/pytorch/rl/issues/1187
"""

import torch
from torch import nn


class TD3Loss(nn.Module):
    def __init__(self, actor, qvalue):
        super().__init__()
        self.actor, self.qvalue = actor, qvalue

    def forward(self, obs, reward):
        action = self.actor(obs).tanh()
        frozen = {name: p.detach() for name, p in self.qvalue.named_parameters()}
        joint = torch.cat([obs, action], 1)
        loss_actor = -torch.func.functional_call(self.qvalue, frozen, (joint,)).mean()
        loss_qvalue = (self.qvalue(joint) - reward).square().mean()
        return {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue}


torch.manual_seed(0)
actor, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
loss_module = TD3Loss(actor, critic)
actor_optim = torch.optim.SGD(actor.parameters(), lr=0.1)
critic_optim = torch.optim.SGD(critic.parameters(), lr=0.1)
for _ in range(3):
    loss = loss_module(torch.randn(4, 3), torch.randn(4, 1))
    actor_optim.zero_grad()
    loss["loss_actor"].backward()
    actor_optim.step()
    critic_optim.zero_grad()
    loss["loss_qvalue"].backward()
    critic_optim.step()

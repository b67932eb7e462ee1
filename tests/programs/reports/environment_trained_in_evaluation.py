"""An environment trains a network in its reset, and the evaluation of the agent switches gradients off.

After https://github.com/automl/DACBench/issues/95
"""

import torch
from torch import nn


class SGDEnv:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.loss_function = nn.CrossEntropyLoss(reduction="none")
        self.loader = [(torch.randn(6, 3), torch.randint(0, 2, (6,))) for _ in range(4)]

    def reset(self):
        self.iterator = iter(self.loader)
        self.lr = 0.1
        self.get_default_reward()
        return torch.zeros(3)

    def step(self, action):
        self.lr = 0.1 * action
        return torch.randn(3), self.get_default_reward(), False

    def get_default_reward(self):
        return -self._train_batch_()

    def _train_batch_(self):
        data, target = next(self.iterator)
        output = self.model(data)
        loss = self.loss_function(output, target)
        self.model.zero_grad()
        loss.mean().backward()
        for p in self.model.parameters():
            p.data -= self.lr * p.grad
        return loss.mean().item()


class DQN:
    def __init__(self, env, eval_env):
        self._q = nn.Linear(3, 2)
        self._env, self._eval_env = env, eval_env

    def get_action(self, s):
        return int(self._q(s).argmax())

    @torch.no_grad()
    def eval(self, episodes):
        rewards = 0.0
        for e in range(episodes):
            s = self._eval_env.reset()
            for t in range(2):
                s, r, d = self._eval_env.step(self.get_action(s))
                rewards += r
        return rewards

    def train(self):
        s = self._env.reset()
        for t in range(2):
            s, r, d = self._env.step(self.get_action(s))
        return self.eval(1)


torch.manual_seed(0)
agent = DQN(SGDEnv(), SGDEnv())
agent.train()

"""Proximal policy optimisation: the old log-probabilities and the advantages carry graphs into every epoch.

After https://github.com/nikhilbarhate99/PPO-PyTorch/issues/29
"""

import torch
from torch import nn


class Memory:
    def __init__(self):
        self.states, self.actions, self.logprobs, self.rewards = [], [], [], []


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.action_layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.value_layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def act(self, state, memory):
        dist = torch.distributions.Categorical(logits=self.action_layer(state))
        action = dist.sample()
        memory.states.append(state)
        memory.actions.append(action)
        memory.logprobs.append(dist.log_prob(action))
        return action.item()

    def evaluate(self, state, action):
        dist = torch.distributions.Categorical(logits=self.action_layer(state))
        return dist.log_prob(action), self.value_layer(state).squeeze(1), dist.entropy()


class PPO:
    def __init__(self, K_epochs):
        self.K_epochs = K_epochs
        self.policy = ActorCritic()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.05)

    def update(self, memory):
        rewards = torch.tensor(memory.rewards)
        old_states, old_actions = torch.stack(memory.states), torch.stack(memory.actions)
        old_logprobs = torch.stack(memory.logprobs)
        advantages = rewards - self.policy.value_layer(old_states).squeeze(1)
        for _ in range(self.K_epochs):
            logprobs, state_values, dist_entropy = self.policy.evaluate(old_states, old_actions)
            ratios = torch.exp(logprobs - old_logprobs)
            surr = torch.min(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            loss = -surr + 0.5 * (state_values - rewards).square() - 0.01 * dist_entropy
            self.optimizer.zero_grad()
            loss.mean().backward()
            self.optimizer.step()


torch.manual_seed(0)
ppo, memory = PPO(K_epochs=3), Memory()
for _ in range(6):
    ppo.policy.act(torch.randn(4), memory)
    memory.rewards.append(float(torch.randn(())))
ppo.update(memory)

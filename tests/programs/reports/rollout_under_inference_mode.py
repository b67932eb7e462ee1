"""Completions are made under inference_mode, and their tensors enter the training loss.

After https://github.com/huggingface/trl/issues/2983
"""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    @torch.inference_mode()
    def generate(self, prompts):
        scores = self.model(prompts)
        return scores.argmax(-1), scores.log_softmax(-1).max(-1).values, prompts * 1.0

    def train(self, prompts):
        completion_ids, old_logps, inputs = self.generate(prompts)
        for _ in range(2):
            logps = self.model(inputs).log_softmax(-1).gather(1, completion_ids[:, None]).squeeze(1)
            loss = -(logps - old_logps).exp().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


torch.manual_seed(0)
trainer = Trainer()
trainer.train(torch.randn(5, 4))

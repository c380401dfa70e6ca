"""What NeMo RL does with a batch, after its sources (`nemo_rl/algorithms`), which no package has: names and formulas
are its own, and only what a bridge can get wrong is here."""

from collections.abc import Mapping
from typing import Any

import torch

Fields = Mapping[str, Any]


class GRPOAdvantageEstimator:
    """The reward less the mean of the prompt's other rows, over their standard deviation."""

    def compute_advantage(self, prompt_ids: Any, rewards: Any, mask: Any) -> Any:
        advantages = torch.zeros_like(rewards)
        for prompt in torch.unique(prompt_ids, dim=0):
            rows = (prompt_ids == prompt).all(1).nonzero().flatten()
            for row in rows:
                others = rewards[rows[rows != row]]
                if len(others):
                    advantages[row] = rewards[row] - others.mean()
                    if len(others) > 1 and others.std() > 0:
                        advantages[row] /= others.std() + 1e-6
        return advantages.unsqueeze(-1).expand(mask.shape)


def flat(fields: Fields) -> dict[str, Any]:
    """The message logs as one padded batch: assistants' tokens train."""
    rows = [
        [
            torch.cat([message["token_ids"] for message in log]),
            torch.cat([torch.full((len(message["token_ids"]),), message["role"] == "assistant") for message in log]),
            torch.cat([message.get("generation_logprobs", torch.zeros(len(message["token_ids"]))) for message in log]),
        ]
        for log in fields["message_log"]
    ]
    ids, mask, logprobs = (torch.nn.utils.rnn.pad_sequence(list(one), batch_first=True) for one in zip(*rows))  # noqa: B905
    return {"input_ids": ids, "token_mask": mask.float(), "generation_logprobs": logprobs}


def loss(model: Any, fields: Fields, advantages: Any, *, token_level: bool) -> Any:
    """Of one global batch, on policy: the ratio is 1, and its gradient is that of the log-probability."""
    data, sample_mask = flat(fields), fields["loss_multiplier"]
    logits = model(data["input_ids"]).logits[:, :-1].float().log_softmax(-1)
    current = logits.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    token_mask = data["token_mask"][:, 1:]
    terms = -advantages[:, 1:] * (current - current.detach()).exp()
    if token_level:
        mask = token_mask * sample_mask.unsqueeze(-1)
        return (terms * mask).sum() / mask.sum()
    rows = (terms * token_mask).sum(-1) / (token_mask.sum(-1) + 1e-8)
    return (rows * sample_mask).sum() / sample_mask.sum()


def advantages(estimator: Any, fields: Fields) -> Any:
    """As `grpo_train` asks for them: rows are compared by their prompts."""
    prompts = torch.nn.utils.rnn.pad_sequence([log[0]["token_ids"] for log in fields["message_log"]], batch_first=True)
    mask = flat(fields)["token_mask"] * fields["loss_multiplier"].unsqueeze(-1)
    return estimator.compute_advantage(
        prompt_ids=prompts, rewards=fields["total_reward"], mask=mask, repeated_batch=fields, logprobs_policy=None
    )

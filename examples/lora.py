"""A language model and LoRA: each site trains a small adapter, and adapters alone are sent.

    python examples/lora.py [FOLDER]

Which letter comes next? Four sites have sentences in a language each. The model is made from a config, with random
weights: nothing is downloaded. The adapter is written to the folder, as peft does it. Needs the extra `lora`.
"""

import sys
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import quafl
from quafl.tasks import next_token, next_token_accuracy

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
SITES = [
    "the cat sat on the mat, and the dog sat on the log. the cow is in the corn, the sheep is in the meadow. ",
    "die katze sitzt auf der matte, und der hund sitzt auf dem ast. die kuh steht im korn, das schaf im klee. ",
    "le chat est sur le tapis, et le chien est sur le banc. la vache est dans le pre, le mouton dans le champ. ",
    "el gato esta en la alfombra, y el perro esta en el banco. la vaca esta en el prado, la oveja en el campo. ",
]
LONGEST = 32


def language_model() -> GPT2LMHeadModel:
    """The same random weights whenever asked."""
    torch.manual_seed(0)
    end = len(LETTERS) - 1
    sizes = {"vocab_size": len(LETTERS), "n_positions": LONGEST, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, use_cache=False))


def passages(text: str) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs by the names that the model's forward has; the targets are the same letters, one further on."""
    letters = torch.tensor([LETTERS.index(letter) for letter in 2 * text]).unfold(0, LONGEST, 4)
    return {"input_ids": letters}, letters


def trained(model: nn.Module, **how: Any) -> quafl.Result:
    """By all sites."""
    return quafl.simulate(
        model=model,
        clients=[passages(text) for text in SITES],
        loss=next_token,
        metrics={"accuracy": next_token_accuracy},
        batch_size=8,
        algorithm=quafl.FedAvg(sampled=2),
        evaluations=3,
        **how,
    )


def octets(result: quafl.Result) -> float:
    """Of a contact, both ways."""
    last = result.rows[-1]
    return (last["bytes_up"] + last["bytes_down"]) / last["contacts"]


chosen = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
adapted = peft.get_peft_model(language_model(), chosen)
result = trained(adapted, optimizer=quafl.adamw(lr=0.02, clip=1.0), until=500)
whole = trained(language_model(), codec=quafl.Identity(), until=200)
print(f"accuracy {result.rows[0]['accuracy']:.2f}, then {result.rows[-1]['accuracy']:.2f}")
print(f"a contact: {octets(result):,.0f} octets; with the whole model at 32 bits {octets(whole):,.0f}")
if len(sys.argv) > 1:
    result.model.save_pretrained(sys.argv[1])

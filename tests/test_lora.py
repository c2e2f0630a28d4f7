"""Language models of which adapters alone are trained and sent: transformers made on the spot, wrapped by peft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import federation
from torch import Tensor, nn
from waiting import wait_for

import quafl
from quafl.core.seams import Task
from quafl.deploy.server import Goals
from quafl.tasks import next_token, next_token_accuracy
from quafl.tasks.local import together

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, CLIENTS = 16, 12, 3


def sequences(seed: int, size: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    """Counting in circles, in the lower or the upper half of the words; and in which."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(0, 2, (size, 1), generator=generator)
    start = torch.randint(0, WORDS // 2, (size, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % (WORDS // 2) + half * (WORDS // 2)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, half.flatten()


def writes() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False, initializer_range=0.2)
    )


def reads() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes)
    )


def writer(rank: int = 4) -> nn.Module:
    """Of the next token."""
    chosen = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return peft.get_peft_model(writes(), chosen)


def reader(rank: int = 4) -> nn.Module:
    """Of the half: its head is new, and trained as a whole."""
    base = reads()
    torch.manual_seed(0)  # which starts the adapter, too
    chosen = peft.LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "value"], lora_dropout=0.1)
    return peft.get_peft_model(base, chosen)


def written(seed: int) -> tuple[Any, Tensor]:
    inputs, _ = sequences(seed)
    return inputs, inputs["input_ids"]


KINDS: dict[str, tuple[Callable[..., nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "next token": (writer, written, {"loss": next_token, "metrics": {"accuracy": next_token_accuracy}}),
    "classification": (reader, sequences, {}),
}
BASES = {writer: writes, reader: reads}
EACH_KIND = pytest.mark.parametrize(("model", "data", "measures"), KINDS.values(), ids=KINDS.keys())
OPTIMIZER = quafl.adamw(lr=0.02, clip=1.0)


def frozen(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}


def same_outputs(one: nn.Module, other: nn.Module, inputs: dict[str, Tensor]) -> bool:
    with torch.no_grad():
        mine, theirs = (module.eval()(**inputs).logits for module in (one, other))
    return torch.equal(mine, theirs)


@EACH_KIND
def test_adapters_alone_are_trained_in_a_simulation_and_peft_saves_and_loads_them(
    model: Callable[[], nn.Module], data: Callable[[int], Any], measures: dict[str, Any], tmp_path: Path
) -> None:
    result = quafl.simulate(
        model=model(),
        clients=[data(seed) for seed in range(CLIENTS)],
        algorithm=quafl.FedAvg(sampled=2, local_steps=4),
        optimizer=OPTIMIZER,
        batch_size=16,
        accumulate=2,
        until=250,
        evaluations=2,
        **measures,
    )
    assert result.rows[-1]["loss"] < result.rows[0]["loss"] - 0.1
    assert result.rows[-1]["accuracy"] > result.rows[0]["accuracy"]
    before, after = frozen(model()), frozen(result.model)
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    result.model.save_pretrained(str(tmp_path))
    again, (inputs, _) = peft.PeftModel.from_pretrained(BASES[model](), str(tmp_path)), data(9)
    assert not same_outputs(model(), result.model, inputs)
    assert same_outputs(again, result.model, inputs)


@EACH_KIND
def test_a_federation_sends_the_adapter_and_writes_it(
    model: Callable[[], nn.Module], data: Callable[[int], Any], measures: dict[str, Any], tmp_path: Path
) -> None:
    def party(seed: int) -> Task:
        return quafl.Local(model(), data(seed), batch_size=16, export=peft.get_peft_model_state_dict, **measures).build(
            seed
        )

    server = party(9)
    algorithm = quafl.FedAvg(sampled=2, local_steps=4)
    with federation(tmp_path, algorithm, quafl.compressed(bits=4), OPTIMIZER) as made:
        run = made.coordinator(server, Goals(rounds=12, every=1.0))
        for number in range(2):
            made.join(f"client-{number}", party(number))
        assert run.run()
        first, last = run.evaluations.rows[0], run.evaluations.rows[-1]
        assert last["loss"] < first["loss"]
        numbers = len(made.machine.server.model)
        assert numbers < 0.3 * sum(p.numel() for p in model().parameters())
        each = (last["bytes_up"] + last["bytes_down"]) / last["contacts"]
        assert 2 * numbers * 4 / 8 < each < 2 * numbers * 4 / 8 + 2500
        state = made.machine.server
    adapter = server.export(state.model, state.buffers)
    assert adapter.keys() == peft.get_peft_model_state_dict(model()).keys()
    loaded, trained = model(), server.flat.module(state.model, state.buffers)
    peft.set_peft_model_state_dict(loaded, adapter)
    assert same_outputs(loaded, trained, data(9)[0])


@EACH_KIND
def test_a_client_with_an_adapter_of_another_rank_is_refused_and_the_tensor_named(
    model: Callable[..., nn.Module], data: Callable[[int], Any], measures: dict[str, Any], tmp_path: Path
) -> None:
    def party(rank: int) -> Task:
        return quafl.Local(model(rank), data(rank), batch_size=16, **measures).build()

    with federation(tmp_path, quafl.FedAvg(sampled=1), quafl.compressed(bits=4), OPTIMIZER) as made:
        made.serve(party(4), Goals(rounds=1, every=1.0))
        north = made.join("north", party(8))
        wait_for(lambda: north.well is not None, otherwise=lambda: "it is still there")
        assert north.well is False
        sentence = str(north.machine.failure)
    assert "tensor 1 of the server's model is 'base_model.model." in sentence
    assert ".lora_A.default.weight 4x32', of north's 'base_model.model." in sentence
    assert ".lora_A.default.weight 8x32'; use the same model at both ends" in sentence


def test_an_adapter_costs_less_than_a_fiftieth_of_what_the_whole_model_costs_at_32_bits() -> None:
    def octets(model: nn.Module, **codec: Any) -> float:
        clients = [written(seed) for seed in range(CLIENTS)]
        found = quafl.simulate(
            model=model, clients=clients, algorithm=quafl.FedAvg(sampled=2, local_steps=1), until=150, **codec,
            evaluations=1, **KINDS["next token"][2],
        )  # fmt: skip
        row = found.rows[-1]
        return (row["bytes_up"] + row["bytes_down"]) / row["contacts"]

    adapter, whole = octets(writer()), octets(writer().merge_and_unload().requires_grad_(), codec=quafl.Identity())
    assert 50 * adapter < whole


def test_what_the_server_brings_says_what_is_written_whoever_has_data() -> None:
    def brought(seed: int, **more: Any) -> quafl.Local:
        return quafl.Local(writer(), written(seed), **KINDS["next token"][2], **more)

    adapter = peft.get_peft_model_state_dict
    all_together = together(brought(9, export=adapter), [brought(seed) for seed in range(2)], seed=0)
    without_data = quafl.Local(writer(), export=adapter).build()
    whole = brought(0).build()
    for task in all_together, without_data:
        assert task.export(*task.initial()).keys() == adapter(writer()).keys()
    assert whole.export(*whole.initial()).keys() == writer().state_dict().keys()
    wrong = quafl.Local(writer(), export=lambda module: module).build()
    with pytest.raises(TypeError, match="export gives a PeftModelForCausalLM, must give tensors by name"):
        wrong.export(*wrong.initial())


def test_tokens_that_are_no_targets_do_not_count() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 5, -100, -100, -100]])
    counted = torch.cat((logits[0, :4], logits[1, :1]))
    targets = torch.tensor([2, 3, 4, 5, 5])
    torch.testing.assert_close(next_token(logits, tokens), nn.functional.cross_entropy(counted, targets))
    assert next_token_accuracy(logits, tokens) == (counted.argmax(-1) == targets).double().mean()

"""Find the sources of the bfloat16 error: run a Llama in float32 and round at chosen places.

python benchmarks/rounding.py MODEL PROMPTS.jsonl [--responses 3 --tokens 128 --dtype bfloat16]

The weights of MODEL must be exact in bfloat16. The script samples responses in float32. For each set of places it
prints the mean absolute difference of their log-probabilities from the pass without rounding.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from solera.engines.decoding import decode
from solera.models import loading
from solera.models.language_model import LanguageModel
from solera.records import Sampling

ENTERING = {"norm", "query and key", "value", "softmax", "attention", "gated", "last norm"}
"""Inputs of matrix products."""
LEAVING = {"projections", "o", "gate and up", "down"}
"""Outputs of matrix products."""
VARIANTS = {
    "a plain pass": ENTERING | LEAVING | {"residual", "rotation", "silu", "logits"},
    "small operations fused, logits in float32": ENTERING | LEAVING | {"residual"},
    "the same, residual stream in float32": ENTERING | LEAVING,
    "the same, products leave in float32": ENTERING,
    "the same, keys and queries in float32": ENTERING - {"query and key"},
    **{f"{place} alone": {place} for place in sorted(ENTERING | LEAVING | {"residual"})},
}


class Rounding:
    """Rounds values at the chosen places."""

    def __init__(self, places: set[str], dtype: torch.dtype) -> None:
        self.places, self.dtype = places, dtype

    def __call__(self, place: str, value: Tensor) -> Tensor:
        return value.to(self.dtype).float() if place in self.places else value


def attend(layer: nn.Module, x_TH: Tensor, rotation: tuple[Tensor, Tensor], at: Rounding) -> Tensor:
    heads = [
        p(x_TH).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    query, key, value = (at("projections", each)[None] for each in heads)
    query, key = (at("query and key", each) for each in apply_rotary_pos_emb(query, key, *rotation))
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, at("value", value)))
    score = query @ key.transpose(-1, -2) * layer.scaling
    score = score.masked_fill(~torch.ones(score.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    share = (score - score.amax(-1, keepdim=True)).exp()
    out = at("attention", at("softmax", share) @ value / share.sum(-1, keepdim=True))
    return at("o", layer.o_proj(out[0].transpose(0, 1).flatten(1)))


def logits(model: LanguageModel, ids_T: Tensor, at: Rounding) -> Tensor:
    body = model.body
    hidden = body.embed_tokens(ids_T)
    rotation = tuple(at("rotation", x) for x in body.rotary_emb(hidden[None], torch.arange(len(ids_T))[None]))
    for layer in body.layers:
        x = at("norm", layer.input_layernorm(hidden))
        hidden = at("residual", hidden + attend(layer.self_attn, x, rotation, at))
        x, mlp = at("norm", layer.post_attention_layernorm(hidden)), layer.mlp
        gate, up = (at("gate and up", product(x)) for product in (mlp.gate_proj, mlp.up_proj))
        gated = at("gated", at("silu", mlp.act_fn(gate)) * up)
        hidden = at("residual", hidden + at("down", mlp.down_proj(gated)))
    return at("logits", model.head(at("last norm", body.norm(hidden))))


def logp(model: LanguageModel, texts: list[tuple[list[int], list[int]]], at: Rounding) -> Tensor:
    parts = []
    for prompt, response in texts:
        logits_TV = logits(model, torch.tensor(prompt + response), at)[len(prompt) - 1 : -1]
        parts.append(torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(parts)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--responses", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model, codec = loading.load(options.model, torch.device("cpu"))
    lines = Path(options.prompts).read_text().splitlines()[: options.responses]
    prompts = [codec.encode(json.loads(line)["prompt"]) for line in lines]
    done = decode(model, prompts, range(len(prompts)), Sampling(1.0, options.tokens), codec.end_token_ids)
    texts = [(list(p), done.token_BT[b, : done.length_B[b]].tolist()) for b, p in enumerate(prompts)]
    exact = logp(model, texts, Rounding(set(), torch.float32))
    print(f"{len(exact)} tokens, {options.dtype}")
    for name, places in VARIANTS.items():
        distance = (logp(model, texts, Rounding(places, getattr(torch, options.dtype))) - exact).abs()
        print(f"{distance.mean():.4f}  {name}", flush=True)


if __name__ == "__main__":
    main()

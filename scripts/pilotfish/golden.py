# SPDX-License-Identifier: Apache-2.0
"""Which layers captured states are: a few rows, recomputed by the target in transformers, against every layer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from pilotfish.errors import UserError
from pilotfish.states import RECAPTURE
from pilotfish.tensors import Faults

# Its names in transformers' decoders.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")

PROBE_TOKENS = 192  # of a row that is recomputed
# Relative errors measured: at most 0.019 (SmolLM2-135M, bf16) and 0.029 (80 random layers), neighbours 0.11 to 1.1.
MAX_ERROR = 0.1
MAX_SHARE = 0.5  # of the error of the next best layer


class Golden:
    """A target loaded by transformers: on the leased GPUs, as far as they hold it, else on the CPU.

    With `gpu`, accelerate spreads the layers over the visible GPUs and puts the rest into memory: together they must
    hold the target. UserError where transformers cannot load it, as for a quantisation that it does not know.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, trust_remote_code: bool, gpu: bool):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, trust_remote_code=trust_remote_code, device_map="auto" if gpu else None
            ).eval()
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, MemoryError) as error:
            raise UserError(
                f"{folder}: transformers cannot load it ({type(error).__name__}: {error}); give the job the memory, or "
                "the GPUs (`gpu` in the profile), that the target needs"
            ) from None
        self.decoder = self.model.get_decoder()
        self.head = self.model.get_output_embeddings()
        found = [getattr(self.decoder, name) for name in FINAL_NORMS if hasattr(self.decoder, name)]
        if not found or self.head is None:
            raise UserError(
                f"{folder}: no final norm or no head found in {type(self.model).__name__}; add the norm's name to "
                "FINAL_NORMS in scripts/pilotfish/golden.py"
            )
        self.norm = found[0]

    @torch.inference_mode()
    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """h(0) to h(L), then the state after the final norm, of token ids [T]: float32 [L + 2, T, H]."""
        before_norm: list[torch.Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        try:
            inputs = torch.tensor([ids], device=self.model.device)
            output = self.decoder(input_ids=inputs, output_hidden_states=True, use_cache=False)
        finally:
            hook.remove()
        # transformers' last of `hidden_states` is normed already (SPECS, section 1).
        found = [*output.hidden_states[:-1], before_norm[-1], output.last_hidden_state]
        return torch.cat([each.float().cpu() for each in found])

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, normed: bool = True) -> torch.Tensor:
        """Logits [N, V] of h(L) [N, H], or of the states without the final norm."""
        states = states.to(self.model.device)
        return self.head(self.norm(states) if normed else states)


def probe_rows(rows: int, parts: int) -> set[int]:
    """Places of the rows to recompute: spread over the split, three at least, and one in every part of equal size."""
    wanted = min(max(3, parts), rows)
    return {round(place) for place in torch.linspace(0, rows - 1, wanted).tolist()}


def layer_errors(stored: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Relative L2 error, median over tokens, of states [T, C, H] against candidates [K, T, H]: [C, K].

    The median, since the first token of many models has a norm that hides all else.
    """
    stored = stored.float()
    errors = [
        (stored - candidate[:, None]).norm(dim=-1) / candidate.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        for candidate in candidates
    ]
    return torch.stack(errors).nan_to_num(torch.inf).median(dim=1).values.T


def _layer_name(layer: int, last: int) -> str:
    return f"h({layer})" if layer <= last else f"h({last}) after the final norm"


def layer_fault(errors: torch.Tensor, declared: int) -> str | None:
    """What the errors [L + 2] against each candidate say against the declared layer, or None."""
    last = len(errors) - 2
    best, next_best = errors.argsort()[:2].tolist()
    error = errors[declared].item()
    if best != declared and errors[best] <= MAX_ERROR:
        shift = f": capture is off by {best - declared:+d}" if best <= last else ""
        return (
            f"holds {_layer_name(best, last)} (error {errors[best]:.3f}), declared h({declared}) "
            f"(error {error:.3f}){shift}"
        )
    if error > MAX_ERROR:
        return (
            f"declared h({declared}) differs from what transformers computes by {error:.3f} (at most {MAX_ERROR}), and "
            f"no other layer is nearer than {errors[best]:.3f}: states of another target, or of other tokens"
        )
    if error > MAX_SHARE * errors[next_best]:
        return f"declared h({declared}) (error {error:.3f}) cannot be told from {_layer_name(next_best, last)}"
    return None


class LayerProbe:
    """Which layers a few rows hold, against what transformers computes for their first tokens."""

    def __init__(self, golden: Golden, layers: Sequence[int]):
        self._golden, self._layers = golden, layers
        self._errors: dict[str, torch.Tensor] = {}

    def take(self, place: str, ids: Sequence[int], states: torch.Tensor) -> None:
        """Recompute a row with token ids [T] and states [T, layers, H]; `place` says where it lies."""
        candidates = self._golden.states(ids[:PROBE_TOKENS])
        self._errors[place] = layer_errors(states[:PROBE_TOKENS], candidates)

    def _typical(self) -> torch.Tensor:
        """Errors [layers, L + 2], the median row's."""
        return torch.stack(list(self._errors.values())).median(dim=0).values

    def refuse(self, where: object) -> None:
        """UserError where a layer is not the declared one, or where one of the rows differs from the others."""
        found = Faults(where)
        for errors, layer in zip(self._typical(), self._layers, strict=True):
            if fault := layer_fault(errors, layer):
                found.add(f"layer h({layer}) of {len(self._errors)} rows: {fault}")
        found.refuse(
            "The engine numbers its layers otherwise, or norms the last: run with the vLLM that envs/ pins, whose "
            f"eagle_aux_hidden_state_layer_ids are h(k). {RECAPTURE}"
        )
        for place, every in self._errors.items():
            for errors, layer in zip(every, self._layers, strict=True):
                if fault := layer_fault(errors, layer):
                    found.add(f"{place}, layer h({layer}): {fault}")
        found.refuse(RECAPTURE)

    def statistics(self) -> dict:
        """Rows recomputed; for each layer the error, and the next best layer with its error."""
        layers = {}
        for errors, layer in zip(self._typical(), self._layers, strict=True):
            other = next(k for k in errors.argsort().tolist() if k != layer)
            layers[str(layer)] = {
                "error": float(f"{errors[layer]:.3g}"),
                "next_best": _layer_name(other, len(errors) - 2),
                "next_error": float(f"{errors[other]:.3g}"),
            }
        return {"rows": len(self._errors), "layers": layers}

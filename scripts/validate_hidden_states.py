# SPDX-License-Identifier: Apache-2.0
"""Gate of a split's hidden states: every sample has its rows, ids equal, layers and shapes right, finite.

python scripts/validate_hidden_states.py --help
"""

import torch

from pilotfish import cli, files, layers, manifest, samples, shards
from pilotfish.errors import UserError


def main() -> None:
    made = cli.parser(__doc__)
    cli.path_argument(made, "--target", "the target's manifest")
    cli.path_argument(made, "--samples", "samples of the split")
    cli.path_argument(made, "--indexes", "index.json of each part", many=True)
    cli.path_argument(made, "--manifest", "manifest to write")
    arguments = made.parse_args()
    facts = manifest.read(arguments.target, "target")["statistics"]
    wanted = layers.layers_to_capture(cli.spec_of(arguments)["capture_layers"], facts)
    checksums = {}
    for index in arguments.indexes:
        for entry in files.read_json(index)["shards"]:
            checksums[_shard(index, entry)] = entry["sha256"]
    statistics = _check_rows(arguments, shards.ShardReader(arguments.indexes, wanted), facts["hidden_size"])
    manifest.write(
        arguments.manifest,
        schema="hidden_states",
        paths=[*arguments.indexes, *checksums],
        checksums=checksums,
        spec=arguments.spec,
        code=arguments.code,
        statistics={"capture_layers": wanted, **statistics},
    )


def _shard(index, entry: dict):
    path = index.parent / entry["file"]
    if not path.is_file() or path.stat().st_size != entry["size"]:
        raise UserError(f"{path}: missing, or not the {entry['size']} bytes that {index} lists; delete {index}")
    if files.sha256_file(path) != entry["sha256"]:
        raise UserError(f"{path}: its checksum is not the one in {index}; delete {index} and run again")
    return path


def _check_rows(arguments, reader: shards.ShardReader, hidden_size: int) -> dict:
    tokens = rows = 0
    norms = torch.zeros(len(reader.layers), dtype=torch.float64)
    for sample in samples.load(arguments.samples):
        row = sample["row"]
        where = f"{arguments.indexes[0].parent.parent}, row {row}"
        if row not in reader:
            raise UserError(f"{where}: no shard holds it; delete {arguments.indexes[0]} and run again")
        held = reader.read(row)
        if held.token_ids.tolist() != sample["input_ids"][:-1]:
            raise UserError(f"{where}: the token ids are not the sample's: states of another request")
        shape = (sample["seq_len"], len(reader.layers), hidden_size)
        if tuple(held.hidden_states.shape) != shape:
            raise UserError(f"{where}: states of shape {tuple(held.hidden_states.shape)}, not {shape}")
        if not torch.isfinite(held.hidden_states).all():
            raise UserError(f"{where}: NaN or infinity in the states; capture it with dtype bfloat16")
        norms += held.hidden_states.float().norm(dim=-1).double().sum(0)
        tokens += shape[0]
        rows += 1
    return {
        "rows": rows,
        "tokens": tokens,
        "mean_norm_by_layer": [round(norm, 3) for norm in (norms / max(tokens, 1)).tolist()],
    }


if __name__ == "__main__":
    cli.run(main)

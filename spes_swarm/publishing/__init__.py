"""Publications: the reference of a round as a model that anyone can load, on the Hugging Face Hub or in a directory.

Any peer may publish, none has to. To use this package:

    from spes_swarm.publishing.snapshot import newest_snapshot, take_snapshot  # the reference, from disk or memory
    from spes_swarm.publishing.pack import RunFacts, pack                      # snapshot -> directory to publish
    from spes_swarm.publishing.target import open_target                       # "USER/REPO" or "file:DIRECTORY"
    from spes_swarm.publishing.source import open_source                       # reads a publication back

    target = open_target("USER/REPO")
    target.check_rights()                                  # HubError says what is missing; leaves nothing behind
    newest = target.newest()                               # Publication or None: round, digest, history ...
    publication = pack(snapshot, directory, RunFacts(tokens=..., peers=..., history=[...]))
    published = target.publish(directory, publication, "Round 120")
    target.prune(keep=10)

A running peer starts `python -m spes_swarm.publish OUTPUT_DIR --to ... --background --json` instead, with stdin closed.
This does all of the above from the newest checkpoint. It exits with code 0 and one line of JSON (`status`, `round`,
`digest`, `revision`, `bytes_sent`, `seconds`, `removed_rounds`), or with 2 and one line on stderr. It may be killed at
any time; the next call resumes. SupersededError means that another peer was faster, which is not a fault.

    source = open_source("USER/REPO@round-000120", expected_run_id=None)
    source.manifest                                        # Manifest: the run, certified by its id
    reference_N = np.empty(source.layout.num_elements, np.float32)
    loaded = source.load(reference_N)                      # LoadedReference: round, versions, digests, tokens ...
    for block in source.blocks([3, 4]): ...                # LoadedBlock, verified; fetched by byte ranges

Imports the packages below it. Start with `publisher` (what `spes_swarm.publish` does) and `source` (reading back).
"""

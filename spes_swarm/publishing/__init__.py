"""Publications: the reference of a round as a model that anybody can load, on the Hugging Face Hub or in a directory.

Any peer may publish, none has to. For those who build on this package:

    from spes_swarm.publishing.snapshot import newest_snapshot, take_snapshot  # the reference, from disk or memory
    from spes_swarm.publishing.pack import RunFacts, pack                      # snapshot -> directory to publish
    from spes_swarm.publishing.target import open_target                       # "USER/REPO" or "file:DIRECTORY"
    from spes_swarm.publishing.source import open_source                       # the way back

    target = open_target("USER/REPO")
    target.check_rights()                                  # HubError says what is missing; leaves nothing behind
    newest = target.newest()                               # Publication or None: round, digest, history ...
    publication = pack(snapshot, directory, RunFacts(tokens=..., peers=..., history=[...]))
    published = target.publish(directory, publication, "Round 120")
    target.prune(keep=10)

A running peer need not do this itself: `python -m spes_swarm.publish OUTPUT_DIR --to ... --background --json` with its
stdin closed does all of it from the newest checkpoint, and ends with exit code 0 and one line of JSON (`status`,
`round`, `digest`, `revision`, `bytes_sent`, `seconds`, `removed_rounds`), or with 2 and one line on stderr. It may be
killed at any moment; the next one goes on. SupersededError means that another peer was faster, which is no fault.

    source = open_source("USER/REPO@round-000120", expected_run_id=None)
    source.manifest                                        # Manifest: the run, certified by its id
    reference_N = np.empty(source.layout.num_elements, np.float32)
    loaded = source.load(reference_N)                      # LoadedReference: round, versions, digests, tokens ...
    for block in source.blocks([3, 4]): ...                # LoadedBlock, verified, by ranges

Imports the packages below it. Begin with `publisher` (what `spes_swarm.publish` does) and `source` (the way back).
"""

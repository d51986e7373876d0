"""Publications: the reference of a round as a model that anyone can load, on the Hugging Face Hub or in a directory.

Any peer may publish, none has to. `background` decides in a running peer when it is its turn, and starts
`python -m spes_swarm.publish OUTPUT_DIR --to ... --background --json`, with stdin closed, which runs `publisher`:

    target = open_target("USER/REPO")                      # or "file:DIRECTORY"; see `target.Target`
    target.check_rights()                                  # HubError says what is missing; leaves nothing behind
    newest = target.newest()                               # Publication or None: round, digest, history ...
    snapshot = newest_snapshot(output_dir)                 # `export`: the reference, mapped from the newest checkpoint
    publication = export(snapshot, output_dir, directory)  # writes the model, the card and the publication manifest
    published = target.publish(directory, publication)
    target.prune(keep=10)

It exits with code 0 and one line of JSON (`status`, `round`, `digest`, `revision`, `bytes_sent`, `seconds`,
`removed_rounds`), or with 2 and one line on stderr. It may be killed at any time; the next call resumes.
SupersededError means that another peer was faster, which is not a fault.

    source = open_source("USER/REPO@round-000120")         # `source` reads a publication back
    source.manifest                                        # Manifest: the run, certified by its id
    reference_N = np.empty(source.layout.num_elements, np.float32)
    source.load(reference_N)                               # verified; round, versions ... are in source.publication
    for index, values_N in source.blocks([3, 4]): ...      # verified; fetched by byte ranges

Imports the packages below it. Start with `publisher` and `source`; `repository` and `directory` are the two kinds of
targets.
"""

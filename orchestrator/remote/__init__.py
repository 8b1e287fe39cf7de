"""Runs in a bucket, or wherever else pyarrow or fsspec reach: `--out s3://bucket/folder`. The rest of the program sees a `Run`.

    place    a folder elsewhere, by its address: lists, fetches, puts, removes. Beside the store alone in importing pyarrow
    ledger   which files of the copy are the same there
    copy     the working copy: a run's folder like any other, on a disk of this host
    uploads  what is finished goes there beside the measuring, each attempt's row last
    claim    who writes there: an object that is written anew every few seconds
    run      the run of all these

A store needs what a disk has and a bucket has not: rename, append, lock, fsync. So a driver works in the copy, where nothing that
is finished is lost whatever is killed, and what is finished goes up as soon as it is. What could not go stays in the copy, for
the next run from there. Another host begins with what the place has.
"""

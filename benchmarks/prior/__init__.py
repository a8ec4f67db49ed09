"""Generates the priors that ship, from generated layers and records of schedules for them.

The prior of processors comes from `records/cpu-11.jsonl.gz` and the layers that these records belong to:

    python -m benchmarks.prior.zoo layers/ --layers 400 --seed 11
    hone hub learn benchmarks/prior/records --models layers/ -o tuner/honed/tuner/search/priors/cpu.prior

The prior of Malis, in 12 minutes:

    python -m benchmarks.prior.zoo layers/21 --layers 600 --seed 21
    python -m benchmarks.prior.zoo layers/22 --layers 300 --seed 22
    python -m benchmarks.prior.zoo layers/23 --layers 70 --seed 23 --kinds picture
    python -m benchmarks.prior.zoo layers/24 --layers 70 --seed 24 --kinds odd
    python -m benchmarks.prior.zoo layers/25 --layers 60 --seed 25 --kinds join
    python -m benchmarks.prior.zoo layers/26 --layers 100 --seed 26 --kinds rows pool move join tail tail
    python -m benchmarks.prior.zoo layers/27 --layers 100 --seed 27 --kinds rows pool move join tail tail
    hone hub learn benchmarks/prior/records --models layers/ --bench mali-g610 -o mali.prior

Both files ship in `tuner/honed/tuner/search/priors`. More records come from
`python -m benchmarks.prior.measure records/12.jsonl --layers 400 --seed 12` on a machine with such a device,
or from `benchmarks.prior.predict` for a Mali. When features change, raise `FORMAT` in `jobs/priorfile.py`;
when spaces change, make the records again.
"""

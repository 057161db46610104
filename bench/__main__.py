"""What ``make bench`` measures: the default policy against its reference, on the handbook."""

from bench.lossless import main

main()

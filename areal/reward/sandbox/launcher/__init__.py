"""Starts programs under one kind of isolation and reports how each ended.

It is run with `-I -S`, without environment variables, once per calling process and kind. It prepares what programs can
share, then waits for jobs. Its processes (`processes`):

    launcher   one per caller; ends with it
      keeper   one per program: enforces the deadline, kills what is left, reports
        init   in a PID namespace only: its end ends every process of the program
          the program, as a user without rights

The kinds of isolation are in `isolation`; what all of them do to a program before it starts is in `program`, the filter
of system calls in `seccomp`, and what Python lacks of the kernel in `kernel`.

These files import the standard library and each other only, by relative names: to the launcher they are a package of
their own, because the packages around them need what is installed and what `-S` leaves out.
"""

"""The C library, against real services and against ones that lie."""

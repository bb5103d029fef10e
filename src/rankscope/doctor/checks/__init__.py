"""The static checks, one module for each part of a host, and the table of all of them."""

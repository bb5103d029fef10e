"""Wire format of cuts: schema and codec."""

"""The two machines of the protocol in virtual time, on a virtual network and virtual disks, where things break on a
schedule that is drawn from one seed; what they promise is checked after every event (docs/rehearsal.md)."""

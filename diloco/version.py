__version__ = "0.2.0"
PROTOCOL = 8  # 2: fragments, result codecs, more outer optimizers; 3: the owner, its amendments, parents; 4: chunks;
# 5: quorum and latch, who follows whom, records with those who stored them; 6: contributions of lost members;
# 7: invites and admissions, in records of peers and of the log; 8: losses in offers, times of a round beside its record
READERS = {4: "0.1.0"}  # which version of diloco reads the folders of an earlier protocol


def refusal(protocol: int) -> str:
    """Describe how to go on with what speaks another protocol than this version of diloco."""
    reader = f": diloco {READERS[protocol]} reads it" if protocol in READERS else ": use the version that wrote it"
    return f"speaks protocol {protocol}, this diloco {PROTOCOL}{reader}"

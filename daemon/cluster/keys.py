"""The names of the keys in etcd, one for each record. Pure."""

PREFIX = "/headway/"


class Keys:
    """Names of keys below PREFIX."""

    NODES = PREFIX + "nodes/"
    JOBS = PREFIX + "jobs/"
    FAILURES = PREFIX + "failures/"
    REACH = PREFIX + "reach/"
    LEADER = PREFIX + "leader"
    PLACEMENT = PREFIX + "placement"
    SHARES = PREFIX + "shares"
    USAGE = PREFIX + "usage"
    INVITATIONS = PREFIX + "invitations/"
    ISSUED = PREFIX + "issued/"
    REVOKED = PREFIX + "revoked/"
    RETIRED = PREFIX + "retired/"
    FOR_LEADER = PREFIX + "~/"
    """Prefix of records on which no step of a node rests: the leader reads them, and whoever chooses relays. They sort
    behind all others, so that one watch of the others leaves them out.
    """
    PROBES = FOR_LEADER + "probes/"

    @staticmethod
    def node(name: str) -> str:
        return f"{Keys.NODES}{name}"

    @staticmethod
    def job(job: str) -> str:
        """Return the prefix of all keys of a job."""
        return f"{Keys.JOBS}{job}/"

    @staticmethod
    def of(job: str, leaf: str) -> str:
        """Return the key of a job's `spec`, `desired`, `phase`, `plan`, `next`, `stop`, `checkpoint` or `progress`."""
        return f"{Keys.JOBS}{job}/{leaf}"

    @staticmethod
    def worker(job: str, generation: int, position: int) -> str:
        return f"{Keys.JOBS}{job}/workers/{generation:08d}/{position:04d}"

    @staticmethod
    def workers(job: str, generation: int) -> str:
        """Return the prefix of all workers of a generation."""
        return f"{Keys.JOBS}{job}/workers/{generation:08d}/"

    @staticmethod
    def state(job: str, timeline: int, boundary: int, node: str) -> str:
        return f"{Keys.JOBS}{job}/state/{timeline:08d}/{boundary:010d}/{node}"

    @staticmethod
    def goodput(job: str, generation: int, position: int) -> str:
        return f"{Keys.JOBS}{job}/goodput/{generation:08d}/{position:04d}"

    @staticmethod
    def profile(job: str, node: str, device_index: int) -> str:
        return f"{Keys.JOBS}{job}/profile/{node}/{device_index}"

    @staticmethod
    def reading(job: str, node: str) -> str:
        return f"{Keys.JOBS}{job}/reading/{node}"

    @staticmethod
    def probes(node: str) -> str:
        return f"{Keys.PROBES}{node}"

    @staticmethod
    def reach(node: str) -> str:
        return f"{Keys.REACH}{node}"

    @staticmethod
    def failure(node: str, number: int) -> str:
        return f"{Keys.FAILURES}{node}/{number:06d}"

    @staticmethod
    def invitation(name: str) -> str:
        """Return the key of an invitation. Names that differ in case alone are one, as where peers compare them."""
        return f"{Keys.INVITATIONS}{name.casefold()}"

    @staticmethod
    def issued(name: str) -> str:
        """Return the key of the newest certificate that was made for an invitation."""
        return f"{Keys.ISSUED}{name.casefold()}"

    @staticmethod
    def revoked(name: str) -> str:
        """Return the key that says that no certificate of a name counts."""
        return f"{Keys.REVOKED}{name.casefold()}"

    @staticmethod
    def retired(job: str) -> str:
        """Return the key that is left of a job whose records were deleted."""
        return f"{Keys.RETIRED}{job}"

    @staticmethod
    def event(job: str, number: int) -> str:
        return f"{Keys.JOBS}{job}/events/{number:06d}"

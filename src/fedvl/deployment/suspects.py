"""Find the client that spoils secure sums: leave clients out until the sum is sound again."""

from collections.abc import Collection

from fedvl.deployment.files import Frozen


class Search(Frozen):
    """A search by halves. It assumes one culprit, and begins again if there were more."""

    suspects: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()  # of the next sum

    def after(self, sound: bool, clients: Collection[int], room: int) -> "Search":
        """Return the search after a sum of these clients; ``room``: how many may be left out."""
        if not self.suspects and sound:
            return self
        if sound:  # the culprit is among those who were left out
            suspects = tuple(client for client in self.suspects if client not in clients)
        else:
            suspects = tuple(client for client in self.suspects if client in clients) or tuple(sorted(clients))
        if sound and len(suspects) == 1:
            return Search(suspects=suspects, left_out=suspects)
        return Search(suspects=suspects, left_out=suspects[: min((len(suspects) + 1) // 2, max(room, 0))])

    @property
    def found(self) -> int | None:
        """The culprit, once a sum without this client alone was sound."""
        return self.suspects[0] if len(self.suspects) == 1 and self.left_out == self.suspects else None

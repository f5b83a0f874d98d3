"""The routes by the servers that have them."""

from meshlm.frontend.http.operation import Group, Operation
from meshlm.frontend.routes.application import OPERATIONS as ALL
from meshlm.frontend.routes.application import served

OPERATIONS = served(documentation=False, development=False)  # of a server that writes text


def of_group(group: Group) -> tuple[Operation, ...]:
    return tuple(operation for operation in ALL if operation.group is group)


DOCUMENTATION, DASHBOARD, DEVELOPMENT, VECTORS, SPEECH = map(
    of_group, (Group.DOCUMENTATION, Group.DASHBOARD, Group.DEVELOPMENT, Group.VECTORS, Group.SPEECH)
)

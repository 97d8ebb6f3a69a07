from __future__ import annotations

import pytest
from laws import cases
from laws.machine import ManagerMachine

pytestmark = pytest.mark.long

TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = cases.law(400, steps=40)

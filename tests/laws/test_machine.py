from __future__ import annotations

from laws import cases
from laws.machine import ManagerMachine

TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = cases.law(400, steps=40)

// Whatever can be read of a manager and its requests, as numbers that are compared.
#pragma once

#include <string>
#include <vector>

#include "fuzz.h"
#include "fuzz_setup.h"

namespace fuzz {

struct Reading {  // one number that the manager tells; of longer answers: a hash
    const char* what;
    int64_t which;
    int field;
    int64_t value;
};
using Readings = std::vector<Reading>;

// With `journals`: also what waits to be taken, and how much of that was dropped.
Readings read_all(kvc_manager* manager, const Setup& setup, const std::vector<int64_t>& handles,
                  const std::vector<int64_t>& loads, bool journals = true);

// Ends the program where a number differs.
void expect_equal(const Where& where, const Readings& wanted, const Readings& seen, const std::string& why);

}  // namespace fuzz

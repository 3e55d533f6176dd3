# Read by CMake right after llama.cpp's own project() line: leaves out the library its command line
# tools are made of, which the Python binding switches on and does not use.
set(LLAMA_BUILD_COMMON OFF)

# Compiler settings shared by every target of the project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# Contraction is off so that a sum of products is the same on every machine unless a
# vector loop asks for fused multiply-add by name.
set(CLO_CXX_FLAGS -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror
                  -ffp-contract=off)
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${CLO_CXX_FLAGS}>")

# GCC 12 warns of overlap inside std::string's own operator+ (its bug 105651, fixed in 13).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()

if(CLO_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined;-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=address,undefined)
endif()

find_program(CLO_CCACHE ccache)
if(CLO_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CLO_CCACHE}")
endif()

include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=mold CLO_HAVE_MOLD)
if(CLO_HAVE_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

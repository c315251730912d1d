# Whether the CUDA backend is built. AUTO: when a toolkit is there; without one, stand-in files say
# so at run time. The code is for compute capability 8.0 to 12.0; it is tuned for 9.0.
set(CLO_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(CLO_CUDA_ARCHITECTURES 90a CACHE STRING "Compute capabilities to compile for, such as 80;90a;120")
set(CLO_HAVE_CUDA OFF)
set(CLO_CUDA_LEAST 12.8)

if(NOT CLO_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # Targets are named by hand below: CMake 3.25 does not know all of them.
    set(CMAKE_CUDA_ARCHITECTURES OFF)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL CLO_CUDA_LEAST)
      set(CLO_HAVE_CUDA ON)
    else()
      message(STATUS "CUDA ${CUDAToolkit_VERSION} found, ${CLO_CUDA_LEAST} or newer is needed")
    endif()
  endif()
  if(CLO_CUDA STREQUAL "ON" AND NOT CLO_HAVE_CUDA)
    message(FATAL_ERROR "CLO_CUDA is ON and no CUDA toolkit ${CLO_CUDA_LEAST} or newer was found "
                        "(nvcc on PATH, or CUDACXX)")
  endif()
endif()
message(STATUS "CUDA backend: ${CLO_HAVE_CUDA}")

if(CLO_HAVE_CUDA)
  # CMake 3.25 does not know nvcc's flag for C++20 either.
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  foreach(kind STANDARD EXTENSION)
    if(NOT DEFINED CMAKE_CUDA20_${kind}_COMPILE_OPTION)
      set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
    endif()
  endforeach()
  set(targets "")
  foreach(architecture IN LISTS CLO_CUDA_ARCHITECTURES)
    string(APPEND targets " -gencode arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  string(APPEND CMAKE_CUDA_FLAGS "${targets} -lineinfo -Werror all-warnings")
  if(CLO_CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${CLO_CCACHE}")
  endif()

  # cuDNN's fused attention is optional: its frontend is headers alone (the PyPI package
  # nvidia-cudnn-frontend), and without either part our own prefill kernel is used.
  find_path(CLO_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
            HINTS "${CMAKE_SOURCE_DIR}/build/third_party/cudnn_frontend/include")
  find_path(CLO_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(CLO_CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib)
endif()

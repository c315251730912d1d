# cmake --install: headers, the rooms' archives, and a package file, so that
# find_package(clo) gives the target clo::clo.
include(CMakePackageConfigHelpers)

get_property(rooms GLOBAL PROPERTY CLO_ROOMS)
# eval and what is only for tests stay here.
list(REMOVE_ITEM rooms clo_eval)
install(TARGETS clo clo_api ${rooms} EXPORT clo_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/clo DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT clo_targets NAMESPACE clo:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/clo)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/cloConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
configure_file(cmake/cloConfig.cmake.in "${CMAKE_BINARY_DIR}/cloConfig.cmake" @ONLY)
install(FILES "${CMAKE_BINARY_DIR}/cloConfig.cmake" "${CMAKE_BINARY_DIR}/cloConfigVersion.cmake"
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/clo)

# clo_room(NAME SOURCES ... [USES rooms...] [LIBS libraries...])
#
# Declares one room of src/ as the static library clo_NAME. Its headers are reached as
# "NAME/header.h" through a generated folder that holds a link to this room alone, so an
# include compiles only when the room is listed under USES (directly or through one that is).
# LIBS are third-party libraries; they stay private, so no room's header may show them.
function(clo_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;USES;LIBS" ${ARGN})
  set(root "${CMAKE_BINARY_DIR}/rooms/${name}")
  file(MAKE_DIRECTORY "${root}")
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${root}/${name}" SYMBOLIC)

  add_library(clo_${name} STATIC ${ROOM_SOURCES})
  target_include_directories(clo_${name} PUBLIC $<BUILD_INTERFACE:${root}>)
  target_link_libraries(clo_${name} PUBLIC clo_api)
  foreach(used IN LISTS ROOM_USES)
    if(NOT TARGET clo_${used})
      message(FATAL_ERROR "room ${name} uses ${used}, which is not declared before it")
    endif()
    target_link_libraries(clo_${name} PUBLIC clo_${used})
  endforeach()
  target_link_libraries(clo_${name} PRIVATE ${ROOM_LIBS})
  set_property(GLOBAL APPEND PROPERTY CLO_ROOMS clo_${name})
endfunction()
